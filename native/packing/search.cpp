#include "packing/search.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <utility>

namespace memplan::packing {

namespace {

constexpr std::int64_t kNone = std::numeric_limits<std::int64_t>::max();

std::uint64_t mix(std::uint64_t value) {  // splitmix64's finaliser
  value += 0x9e3779b97f4a7c15ULL;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ULL;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebULL;
  return value ^ (value >> 31);
}

std::size_t at(int index) { return static_cast<std::size_t>(index); }

}  // namespace

Search::Search(const Problem& problem, std::int64_t capacity, std::uint64_t seed,
               const std::atomic<bool>& stop)
    : problem_(problem), capacity_(capacity), stop_(stop), random_state_(mix(seed)) {
  const std::size_t n = problem.items.size();
  const std::size_t sections = at(problem.sections);
  offsets_.assign(n, -1);
  keys_.resize(n);
  for (std::size_t i = 0; i < n; ++i) keys_[i] = mix(i + 1);
  known_.assign(std::size_t{1} << 20, 0);  // a power of two
  floor_.assign(sections, 0);
  closed_.assign(sections, 0);
  remaining_ = problem.load;
  valley_of_.assign(sections, -1);
  effective_.assign(sections, 0);
  count_.assign(sections, 0);
  release_.assign(n, 0);
  weight_.assign(sections, 1.0);
  signature_.assign(sections, 0);
  held_.assign(sections, 0);
  covering_.resize(sections);
  for (std::size_t i = 0; i < n; ++i) {
    for (int s = problem.items[i].first; s < problem.items[i].last; ++s) {
      covering_[at(s)].push_back(static_cast<int>(i));
    }
  }
  ceiling_.assign(sections, kNone);
  for (const Item& item : problem.items) has_fixed_ = has_fixed_ || item.fixed >= 0;
  score_.assign(n, 0.0);

  std::vector<int> sorted(n);
  for (std::size_t i = 0; i < n; ++i) sorted[i] = static_cast<int>(i);
  const auto key = [&](int i) {
    const Item& item = problem_.items[at(i)];
    return std::tuple(item.first, item.last, item.size, item.alignment, item.fixed);
  };
  std::stable_sort(sorted.begin(), sorted.end(), [&](int a, int b) { return key(a) < key(b); });
  same_before_.assign(n, -1);
  for (std::size_t i = 1; i < n; ++i) {
    const bool free = problem.items[at(sorted[i])].fixed < 0;
    if (free && key(sorted[i]) == key(sorted[i - 1])) same_before_[at(sorted[i])] = sorted[i - 1];
  }
}

double Search::random() {
  random_state_ = mix(random_state_);
  return static_cast<double>(random_state_ >> 11) * 0x1.0p-53;
}

Outcome Search::run(const Heuristic& heuristic, std::int64_t limit) {
  if (problem_.bound > capacity_) return Outcome::kImpossible;
  heuristic_ = heuristic;
  limit_ = limit;
  dead_ends_ = 0;
  const auto relative = [](std::int64_t value, std::int64_t most) {
    return most > 0 ? static_cast<double>(value) / static_cast<double>(most) : 0.0;
  };
  std::int64_t biggest = 1;
  for (const Item& item : problem_.items) biggest = std::max(biggest, item.size);
  std::vector<int> items;
  for (std::size_t i = 0; i < problem_.items.size(); ++i) {
    const Item& item = problem_.items[i];
    const std::int64_t load = *std::max_element(problem_.load.begin() + item.first,
                                                problem_.load.begin() + item.last);
    score_[i] = heuristic.length * relative(item.length(), problem_.sections) +
                heuristic.size * relative(item.size, biggest) +
                heuristic.load * relative(load, problem_.max_load);
    if (heuristic.noise > 0) {
      score_[i] *= 1.0 + heuristic.noise * (2.0 * random() - 1.0);
    }
    items.push_back(static_cast<int>(i));
  }
  return solve_parts(items, 0, problem_.sections);
}

void Search::place(int item, std::int64_t offset) {
  const Item& it = problem_.items[at(item)];
  offsets_[at(item)] = offset;
  for (int s = it.first; s < it.last; ++s) {
    floor_[at(s)] = offset + it.size;
    remaining_[at(s)] -= it.size;
    closed_[at(s)] = 0;
  }
}

void Search::unplace(int item) {
  const Item& it = problem_.items[at(item)];
  offsets_[at(item)] = -1;
  for (int s = it.first; s < it.last; ++s) remaining_[at(s)] += it.size;
}

// Sections without a buffer left to place are walls: what lies between two of them is a problem of
// its own, and a dead end in one is no reason to try again in another.
Outcome Search::solve_parts(std::vector<int>& items, int first, int last) {
  std::vector<std::pair<int, int>> parts;
  for (int s = first; s < last; ++s) {
    if (remaining_[at(s)] == 0) continue;
    if (!parts.empty() && parts.back().second == s) {
      parts.back().second = s + 1;
    } else {
      parts.emplace_back(s, s + 1);
    }
  }
  if (parts.size() == 1) return solve(items, parts[0].first, parts[0].second);
  std::vector<std::pair<std::int64_t, std::vector<int>>> work(parts.size());
  for (std::size_t p = 0; p < parts.size(); ++p) {
    std::int64_t slack = kNone;
    for (int s = parts[p].first; s < parts[p].second; ++s) {
      slack = std::min(slack, capacity_ - floor_[at(s)] - remaining_[at(s)]);
    }
    work[p].first = slack;
  }
  for (const int item : items) {
    const int start = problem_.items[at(item)].first;
    const auto part = std::upper_bound(parts.begin(), parts.end(), start,
                                       [](int s, const auto& p) { return s < p.second; });
    work[static_cast<std::size_t>(part - parts.begin())].second.push_back(item);
  }
  std::vector<std::size_t> by_slack(parts.size());
  for (std::size_t p = 0; p < parts.size(); ++p) by_slack[p] = p;
  std::sort(by_slack.begin(), by_slack.end(),
            [&](std::size_t a, std::size_t b) { return work[a].first < work[b].first; });
  for (const std::size_t p : by_slack) {
    const Outcome outcome = solve(work[p].second, parts[p].first, parts[p].second);
    if (outcome == Outcome::kFound) continue;
    for (const int item : items) {
      if (offsets_[at(item)] >= 0) unplace(item);
    }
    return outcome;
  }
  return Outcome::kFound;
}

Outcome Search::solve(std::vector<int>& items, int first, int last) {
  ++nodes_;
  const std::vector<std::int64_t> floors(floor_.begin() + first, floor_.begin() + last);
  const std::vector<std::uint8_t> closed(closed_.begin() + first, closed_.begin() + last);
  std::vector<int> left = items;
  const auto restore = [&] {
    for (const int item : items) {
      if (offsets_[at(item)] >= 0) unplace(item);
    }
    std::copy(floors.begin(), floors.end(), floor_.begin() + first);
    std::copy(closed.begin(), closed.end(), closed_.begin() + first);
  };

  Choice choice;
  if (!propagate(left, first, last, choice)) {
    restore();
    ++dead_ends_;
    return Outcome::kImpossible;
  }
  if (left.empty()) return Outcome::kFound;
  if (choice.section < 0) {
    const Outcome outcome = solve_parts(left, first, last);
    if (outcome != Outcome::kFound) restore();
    return outcome;
  }
  const std::uint64_t hash = state_hash(left, first, last);
  if (known_impossible(hash)) {
    restore();
    ++dead_ends_;
    return Outcome::kImpossible;
  }
  const Outcome outcome = branch(left, first, last, choice);
  if (outcome == Outcome::kImpossible) remember(hash);
  if (outcome != Outcome::kFound) restore();
  return outcome;
}

Outcome Search::branch(std::vector<int>& items, int first, int last, const Choice& choice) {
  const std::vector<std::int64_t> floors(floor_.begin() + first, floor_.begin() + last);
  const std::vector<std::uint8_t> closed(closed_.begin() + first, closed_.begin() + last);
  const std::size_t options = choice.items.size() + (choice.may_skip ? 1 : 0);
  std::vector<int> left;
  for (std::size_t option = 0; option < options; ++option) {
    if (dead_ends_ >= limit_ || stop_.load(std::memory_order_relaxed)) return Outcome::kLimit;
    int item = -1;
    left = items;
    if (option == choice.items.size()) {
      closed_[at(choice.section)] = 1;
    } else {
      item = choice.items[option];
      place(item, rest_of(item));
      left.erase(std::find(left.begin(), left.end(), item));
    }
    const Outcome outcome = left.empty() ? Outcome::kFound : solve_parts(left, first, last);
    if (outcome == Outcome::kFound) return outcome;
    if (item >= 0) unplace(item);
    std::copy(floors.begin(), floors.end(), floor_.begin() + first);
    std::copy(closed.begin(), closed.end(), closed_.begin() + first);
    if (outcome == Outcome::kLimit) return outcome;
  }
  return Outcome::kImpossible;
}

// Follows what is forced until there is a choice, or a wall (then `choice` names no section).
// Returns false at a dead end.
bool Search::propagate(std::vector<int>& items, int first, int last, Choice& choice) {
  for (;;) {
    bool raised = false;
    if (!analyse(items, first, last, raised)) return false;
    if (raised) continue;
    choose(choice);
    if (choice.count + (choice.may_skip ? 1 : 0) > 1) break;
    if (choice.may_skip) {
      closed_[at(choice.section)] = 1;
      continue;
    }
    const auto forced = std::find_if(candidates_.begin(), candidates_.end(), [&](int item) {
      const Item& it = problem_.items[at(item)];
      return it.first <= choice.section && choice.section < it.last;
    });
    const int item = *forced;
    place(item, rest_of(item));
    items.erase(std::find(items.begin(), items.end(), item));
    if (items.empty()) return true;
    const Item& it = problem_.items[at(item)];
    for (int s = it.first; s < it.last; ++s) {
      if (remaining_[at(s)] == 0) {
        choice.section = -1;
        return true;
      }
    }
  }
  order(choice);
  return true;
}

void Search::order(Choice& choice) {
  choice.items.clear();
  for (const int item : candidates_) {
    const Item& it = problem_.items[at(item)];
    if (it.first <= choice.section && choice.section < it.last) choice.items.push_back(item);
  }
  std::stable_sort(choice.items.begin(), choice.items.end(),
                   [&](int a, int b) { return score_[at(a)] > score_[at(b)]; });
}

// Where an item rests that is a candidate now.
std::int64_t Search::rest_of(int item) const {
  const Item& it = problem_.items[at(item)];
  return it.fixed >= 0 ? it.fixed : align_up(floor_[at(it.first)], it.alignment);
}

void Search::find_valleys(int first, int last) {
  valleys_.clear();
  for (int s = first; s < last;) {
    if (remaining_[at(s)] == 0) {
      valley_of_[at(s)] = -1;
      ++s;
      continue;
    }
    int end = s + 1;
    while (end < last && remaining_[at(end)] > 0 && floor_[at(end)] == floor_[at(s)]) ++end;
    const auto wall = [&](int t) { return t < first || t >= last || remaining_[at(t)] == 0; };
    const std::int64_t left = wall(s - 1) ? kNone : floor_[at(s - 1)];
    const std::int64_t right = wall(end) ? kNone : floor_[at(end)];
    const bool lowest = left > floor_[at(s)] && right > floor_[at(s)];
    const int valley = lowest ? static_cast<int>(valleys_.size()) : -1;
    if (lowest) {
      const std::int64_t ceiling =
          *std::min_element(ceiling_.begin() + s, ceiling_.begin() + end);
      valleys_.push_back({s, end, std::min({left, right, ceiling}), kNone, 0});
    }
    for (; s < end; ++s) {
      valley_of_[at(s)] = valley;
      effective_[at(s)] = floor_[at(s)];
      count_[at(s)] = 0;
    }
  }
}

void Search::find_candidates(const std::vector<int>& items) {
  candidates_.clear();
  for (const int item : items) {
    const Item& it = problem_.items[at(item)];
    const int v = valley_of_[at(it.first)];
    if (v < 0 || it.last > valleys_[at(v)].last) continue;
    const int twin = same_before_[at(item)];
    if (twin >= 0 && offsets_[at(twin)] < 0) continue;
    const std::int64_t floor = floor_[at(it.first)];
    if (it.fixed >= 0 && it.fixed != floor) continue;
    const std::int64_t top = rest_of(item) + it.size;
    const std::int64_t padding = top - it.size - floor;
    bool fits = true;
    for (int s = it.first; s < it.last && fits; ++s) {
      fits = closed_[at(s)] == 0 && floor + padding + remaining_[at(s)] <= capacity_ &&
             (top <= ceiling_[at(s)] || it.fixed >= 0);
    }
    if (!fits) continue;
    candidates_.push_back(item);
    ++valleys_[at(v)].candidates;
    valleys_[at(v)].lowest_top = std::min(valleys_[at(v)].lowest_top, top);
    for (int s = it.first; s < it.last; ++s) ++count_[at(s)];
  }
}

// What the floor of a section of the valley at least becomes when nothing rests on it as it is.
std::int64_t Search::floor_if_skipped(const Valley& valley) {
  return std::min(valley.next, valley.lowest_top);
}

// A valley without a candidate is filled with nothing, up to its lower neighbour.
bool Search::raise_valleys(bool& raised) {
  for (const Valley& valley : valleys_) {
    if (valley.candidates > 0) continue;
    const std::int64_t next = valley.next;
    if (next <= floor_[at(valley.first)] || next == kNone) return false;
    for (int s = valley.first; s < valley.last; ++s) {
      if (next + remaining_[at(s)] > capacity_) return count_failure(s);
      floor_[at(s)] = next;
      closed_[at(s)] = 0;
    }
    raised = true;
  }
  return true;
}

bool Search::analyse(const std::vector<int>& items, int first, int last, bool& raised) {
  if (has_fixed_) find_ceilings(items, first, last);
  find_valleys(first, last);
  find_candidates(items);
  if (!raise_valleys(raised)) return false;
  if (raised) return true;
  for (const Valley& valley : valleys_) {
    for (int s = valley.first; s < valley.last; ++s) {
      if (count_[at(s)] > 0) continue;
      effective_[at(s)] = floor_if_skipped(valley);
      if (effective_[at(s)] + remaining_[at(s)] > capacity_) return count_failure(s);
    }
  }
  return sections_hold(items, first, last);
}

void Search::find_ceilings(const std::vector<int>& items, int first, int last) {
  std::fill(ceiling_.begin() + first, ceiling_.begin() + last, kNone);
  for (const int item : items) {
    const Item& it = problem_.items[at(item)];
    if (it.fixed < 0) continue;
    for (int s = it.first; s < it.last; ++s) {
      ceiling_[at(s)] = std::min(ceiling_[at(s)], it.fixed);
    }
  }
}

// Every buffer has a least offset: the highest floor that it meets. The buffers of one section are
// then jobs with release dates on one machine, whose makespan, in order of release, is a bound.
bool Search::sections_hold(const std::vector<int>& items, int first, int last) {
  std::fill(signature_.begin() + first, signature_.begin() + last, 0);
  for (const int item : items) {
    const Item& it = problem_.items[at(item)];
    std::int64_t release = *std::max_element(effective_.begin() + it.first,
                                             effective_.begin() + it.last);
    release = align_up(release, it.alignment);
    if (it.fixed >= 0) {
      if (release > it.fixed) return false;
      release = it.fixed;
    }
    if (release + it.size > capacity_) return false;
    release_[at(item)] = release;
    const std::uint64_t mark = mix(keys_[at(item)] ^ static_cast<std::uint64_t>(release));
    for (int s = it.first; s < it.last; ++s) signature_[at(s)] += mark;
  }
  // Most sections are as they were at the last node, where they held.
  for (int s = first; s < last; ++s) {
    if (signature_[at(s)] == held_[at(s)]) continue;
    if (!section_holds(s)) return count_failure(s);
    held_[at(s)] = signature_[at(s)];
  }
  return true;
}

bool Search::section_holds(int section) {
  jobs_.clear();
  for (const int item : covering_[at(section)]) {
    if (offsets_[at(item)] >= 0) continue;
    jobs_.emplace_back(release_[at(item)], problem_.items[at(item)].size);
  }
  std::sort(jobs_.begin(), jobs_.end());
  std::int64_t end = 0;
  for (const auto& [release, size] : jobs_) end = std::max(end, release) + size;
  return end <= capacity_;
}

bool Search::count_failure(int section) {
  weight_[at(section)] += 1.0;
  return false;
}

// The section with the fewest choices, seen against the dead ends met there before.
void Search::choose(Choice& choice) const {
  double fewest = std::numeric_limits<double>::max();
  std::int64_t least = kNone;
  for (const Valley& valley : valleys_) {
    for (int s = valley.first; s < valley.last; ++s) {
      if (count_[at(s)] == 0) continue;
      const bool may_skip = floor_if_skipped(valley) + remaining_[at(s)] <= capacity_;
      const int options = count_[at(s)] + (may_skip ? 1 : 0);
      const double rank = options == 1 ? 0.0 : options / std::pow(weight_[at(s)], heuristic_.power);
      const std::int64_t slack = capacity_ - floor_[at(s)] - remaining_[at(s)];
      if (rank < fewest || (rank == fewest && slack < least)) {
        fewest = rank;
        least = slack;
        choice.section = s;
        choice.may_skip = may_skip;
        choice.count = count_[at(s)];
      }
    }
  }
}

std::uint64_t Search::state_hash(const std::vector<int>& items, int first, int last) const {
  std::uint64_t hash = mix(static_cast<std::uint64_t>(first) << 32 | static_cast<unsigned>(last));
  for (const int item : items) hash ^= keys_[at(item)];
  for (int s = first; s < last; ++s) {
    hash = mix(hash ^ (static_cast<std::uint64_t>(floor_[at(s)]) << 1 | closed_[at(s)]));
  }
  return hash | 1;
}

}  // namespace memplan::packing

#include "packing/skyline.hpp"

#include <algorithm>
#include <limits>

namespace memplan::packing {

namespace {

std::size_t at(int index) { return static_cast<std::size_t>(index); }

}  // namespace

Skyline::Skyline(const Problem& problem)
    : problem_(problem), candidates_(problem.items), ceilings_(problem) {
  const auto& items = problem.items;
  for (std::size_t i = 0; i < items.size(); ++i) {
    const int twin = items[i].twin;
    if (twin >= 0 && items[at(twin)].first < items[i].first) twins_.push_back(static_cast<int>(i));
  }
  std::stable_sort(twins_.begin(), twins_.end(), [&](int a, int b) {
    return items[at(items[at(a)].twin)].last > items[at(items[at(b)].twin)].last;
  });
}

void Skyline::set_run(int first, int last, std::int64_t floor) {
  run_last_[at(first)] = last;
  run_first_[at(last - 1)] = first;
  run_floor_[at(first)] = floor;
  if (problem_.twins) floors_.raise(first, last, floor);
  lowest_.push({floor, first, last});
}

// With neighbours of the same floor it makes one run.
void Skyline::join_run(int first, int last, std::int64_t floor) {
  if (last < problem_.sections && run_floor_[at(last)] == floor) {
    const int right = last;
    last = run_last_[at(right)];
    run_last_[at(right)] = -1;
  }
  if (first > 0 && run_floor_[at(run_first_[at(first - 1)])] == floor) {
    run_last_[at(first)] = -1;
    first = run_first_[at(first - 1)];
  }
  set_run(first, last, floor);
}

bool Skyline::current(const Run& run) const {
  return run_last_[at(run.first)] == run.last && run_floor_[at(run.first)] == run.floor;
}

// What rests on the run's floor; where nothing does, a twin that has to hang above it; -1: nothing.
int Skyline::choose(const Run& run, double at_side, std::int64_t ceiling) const {
  if (ceiling == Ceilings::kNone && !problem_.twins) return choose(run, at_side, nullptr);
  const Candidates::Fits rests = [&](int item) {
    const Item& it = problem_.items[at(item)];
    if (it.twin >= 0) return common_offset(item) == align_up(run.floor, it.alignment);
    const std::int64_t top = align_up(run.floor, it.alignment) + it.size;
    return top <= ceiling || top <= ceilings_.lowest(it.first, it.last).offset;
  };
  const int best = choose(run, at_side, &rests);
  if (best >= 0 || !problem_.twins) return best;
  const Candidates::Fits hangs = [&](int item) { return problem_.items[at(item)].twin >= 0; };
  return choose(run, at_side, &hangs);
}

int Skyline::choose(const Run& run, double at_side, const Candidates::Fits* fits) const {
  const int tight = slack_.least(run.first, run.last).first;
  const int best = candidates_.best({run.first, tight, tight + 1, run.last}, fits);
  if (best < 0) return candidates_.best({run.first, run.last, run.first, run.last}, fits);
  if (at_side > 1) return best;
  const int left = candidates_.best({run.first, run.first, tight + 1, run.last}, fits);
  const int right = candidates_.best({run.first, tight, run.last, run.last}, fits);
  const auto score = [&](int item) { return item < 0 ? -1.0 : candidates_.score(item); };
  const int side = score(right) > score(left) ? right : left;
  return score(side) >= at_side * score(best) ? side : best;
}

// The least offset at which an item and its twin are both above what is placed and clear of what is
// decided.
std::int64_t Skyline::common_offset(int item) const {
  const Item& it = problem_.items[at(item)];
  const Item& twin = problem_.items[at(it.twin)];
  std::int64_t offset =
      std::max(floors_.highest(it.first, it.last), floors_.highest(twin.first, twin.last));
  for (;;) {
    const std::int64_t next = ceilings_.clear_from(it.twin, ceilings_.clear_from(item, offset));
    if (next == offset) return offset;
    offset = next;
  }
}

void Skyline::decide(int item) {
  const std::int64_t offset = common_offset(item);
  for (const int one : {item, problem_.items[at(item)].twin}) {
    ceilings_.decide(one, offset);
    candidates_.remove(one);
  }
}

// Nothing fits: the valley is lost up to its lower neighbour or the lowest fixed buffer above it.
void Skyline::raise(const Run& run, std::int64_t ceiling) {
  std::int64_t next = ceiling;
  if (run.first > 0) next = std::min(next, run_floor_[at(run_first_[at(run.first - 1)])]);
  if (run.last < problem_.sections) next = std::min(next, run_floor_[at(run.last)]);
  slack_.add(run.first, run.last, run.floor - next);
  join_run(run.first, run.last, next);
}

void Skyline::rest(const Run& run, int item, std::int64_t offset) {
  const Item& it = problem_.items[at(item)];
  if (run.first < it.first) set_run(run.first, it.first, run.floor);
  if (it.last < run.last) set_run(it.last, run.last, run.floor);
  join_run(it.first, it.last, offset + it.size);
}

std::int64_t Skyline::fill(const Policy& policy, const std::atomic<bool>& stop,
                           std::vector<std::int64_t>& offsets) {
  candidates_.reset(policy.score);
  std::vector<std::int64_t> slack(problem_.load.size());
  for (std::size_t s = 0; s < slack.size(); ++s) {
    slack[s] = problem_.bound - problem_.load[s];
  }
  slack_.reset(slack);
  run_last_.assign(slack.size(), -1);
  run_first_.assign(slack.size(), 0);
  run_floor_.assign(slack.size(), -1);
  lowest_ = {};
  ceilings_.reset();
  if (problem_.twins) floors_.reset(problem_.sections);
  offsets.assign(problem_.items.size(), -1);
  std::int64_t height = 0;
  std::size_t left = problem_.items.size();
  set_run(0, problem_.sections, 0);
  if (policy.twins_first) {
    for (const int item : twins_) decide(item);
  }
  while (left > 0) {
    const Run run = lowest_.top();
    lowest_.pop();
    if (!current(run)) continue;
    if (stop.load(std::memory_order_relaxed)) return -1;
    const Ceilings::Lowest above = ceilings_.lowest(run.first, run.last);
    // All lower floors are gone, so the run holds the whole of a fixed buffer that it has reached.
    const bool reached = above.offset == run.floor;
    const int chosen = reached ? above.item : choose(run, policy.at_side, above.offset);
    if (chosen < 0) {
      raise(run, above.offset);
      continue;
    }
    if (!reached && problem_.items[at(chosen)].twin >= 0) {
      decide(chosen);
      lowest_.push(run);
      continue;
    }
    const Item& item = problem_.items[at(chosen)];
    const std::int64_t offset = align_up(run.floor, item.alignment);
    if (reached) {
      ceilings_.place(chosen);
    } else {
      candidates_.remove(chosen);
    }
    offsets[at(chosen)] = offset;
    --left;
    height = std::max(height, offset + item.size);
    rest(run, chosen, offset);
  }
  return height;
}

}  // namespace memplan::packing

#include "packing/repair.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <utility>

#include "packing/search.hpp"
#include "packing/shake.hpp"

namespace memplan::packing {

namespace {

constexpr double kLeastItems = 16;
constexpr double kMostItems = 4'000;
constexpr int kDescents = 12;
constexpr std::size_t kMostSearched = 200;  // items
constexpr std::int64_t kDeadEnds = 200;
constexpr Heuristic kHeuristic = {0, 1, 0, 0.2, 0.5};

std::size_t at(int index) { return static_cast<std::size_t>(index); }

}  // namespace

Repair::Repair(const Problem& problem, const std::vector<Skyline::Policy>& policies,
               std::uint64_t seed)
    : problem_(problem), policies_(policies), random_(seed) {
  by_first_.resize(problem.items.size());
  std::iota(by_first_.begin(), by_first_.end(), 0);
  std::stable_sort(by_first_.begin(), by_first_.end(), [&](int a, int b) {
    return problem.items[at(a)].first < problem.items[at(b)].first;
  });
  place_.resize(by_first_.size());
  for (std::size_t i = 0; i < by_first_.size(); ++i) place_[at(by_first_[i])] = i;
}

std::int64_t Repair::top(int item) const {
  return offsets_[at(item)] + problem_.items[at(item)].size;
}

bool Repair::may_move(int item) const {
  return problem_.items[at(item)].fixed < 0 && problem_.items[at(item)].twin < 0;
}

int Repair::highest() const {
  int found = 0;
  for (std::size_t i = 1; i < offsets_.size(); ++i) {
    if (top(static_cast<int>(i)) > top(found)) found = static_cast<int>(i);
  }
  return found;
}

void Repair::begin(const std::vector<std::int64_t>& offsets) {
  offsets_ = offsets;
  height_ = top(highest());
}

void Repair::run(std::int64_t work, std::int64_t goal, const std::atomic<bool>& stop) {
  while (work > 0 && !stop.load(std::memory_order_relaxed)) {
    const int item = highest();
    height_ = top(item);
    if (height_ <= goal || !may_move(item)) return;
    const Window window = window_around(item);
    const auto items = static_cast<std::int64_t>(window.problem.items.size());
    work -= items * lay_out(window, goal, stop);
  }
  height_ = top(highest());
}

// As many items as drawn begin in it, about as many before the given one as after it.
Repair::Window Repair::window_around(int item) {
  std::uniform_real_distribution<double> unit(0.0, 1.0);
  const double spread = std::log(kMostItems / kLeastItems);
  const auto items = static_cast<std::size_t>(kLeastItems * std::exp(spread * unit(random_)));
  const auto before = static_cast<std::size_t>(static_cast<double>(items) * unit(random_));
  const std::size_t place = place_[at(item)];
  const std::size_t begin = place - std::min(place, before);
  const std::size_t end = std::min(place + (items - before), by_first_.size() - 1);
  const auto first_of = [&](std::size_t i) { return problem_.items[at(by_first_[i])].first; };

  Window window;
  window.first = first_of(begin);
  window.last = std::max(first_of(end) + 1, problem_.items[at(item)].last);
  if (end + 1 == by_first_.size()) window.last = problem_.sections;
  window.height = 0;
  window.problem.sections = window.last - window.first;
  window.problem.bound = problem_.bound;
  std::vector<int> staying;
  for (std::size_t i = 0; i < by_first_.size(); ++i) {
    const int row = by_first_[i];
    const Item& it = problem_.items[at(row)];
    if (it.first >= window.last) break;
    if (it.last <= window.first) continue;
    if (it.first < window.first || it.last > window.last || !may_move(row)) {
      staying.push_back(row);
      continue;
    }
    Item moved = it;
    moved.first -= window.first;
    moved.last -= window.first;
    window.problem.items.push_back(moved);
    window.rows.push_back(row);
    window.height = std::max(window.height, top(row));
  }
  add_rest(window, staying);
  return window;
}

// What stays, as fixed items; those that lie on one another over the whole window are one.
void Repair::add_rest(Window& window, std::vector<int>& staying) const {
  std::sort(staying.begin(), staying.end(),
            [&](int a, int b) { return offsets_[at(a)] < offsets_[at(b)]; });
  auto& items = window.problem.items;
  std::size_t block = 0;  // an item that ends where the last one that stays throughout does
  for (const int row : staying) {
    const Item& it = problem_.items[at(row)];
    const int first = std::max(it.first - window.first, 0);
    const int last = std::min(it.last, window.last) - window.first;
    const std::int64_t offset = offsets_[at(row)];
    const bool throughout = first == 0 && last == window.problem.sections;
    if (throughout && block > 0 && items[block].fixed + items[block].size == offset) {
      items[block].size += it.size;
      continue;
    }
    if (throughout) block = items.size();
    items.push_back({first, last, it.size, 1, offset, -1});
  }
  auto& load = window.problem.load;
  load.assign(at(window.problem.sections) + 1, 0);
  for (const Item& it : items) {
    load[at(it.first)] += it.size;
    load[at(it.last)] -= it.size;
  }
  std::partial_sum(load.begin(), load.end(), load.begin());
  load.pop_back();
  window.problem.max_load = *std::max_element(load.begin(), load.end());
}

// Some descents, and where few items did not come down to the goal the exact search. Keeps what is
// no higher than it was. Returns how many descents it took.
int Repair::lay_out(const Window& window, std::int64_t goal, const std::atomic<bool>& stop) {
  Skyline skyline(window.problem);
  const Skyline::Policy& like = policies_[random_() % policies_.size()];
  Skyline::Policy policy{{}, like.at_side, false};
  int descents = 0;
  const auto descent = [&](const std::vector<double>& score, std::vector<std::int64_t>& offsets) {
    ++descents;
    policy.score = score;
    std::int64_t height = skyline.fill(policy, stop, offsets);
    if (height < 0) return height;
    height = 0;
    for (std::size_t i = 0; i < window.rows.size(); ++i) {
      height = std::max(height, offsets[i] + window.problem.items[i].size);
    }
    return height;
  };
  std::vector<double> score(window.problem.items.size(), 1.0);
  for (std::size_t i = 0; i < window.rows.size(); ++i) score[i] = like.score[at(window.rows[i])];
  Shake shake(window.problem, std::move(score), random_());
  shake.run(descent, kDescents, goal);
  const std::vector<std::int64_t>* found =
      shake.height() >= 0 && shake.height() <= window.height ? &shake.offsets() : nullptr;
  std::optional<Search> search;
  if (shake.height() > goal && window.problem.items.size() <= kMostSearched) {
    descents += kDescents;
    search.emplace(window.problem, goal, random_(), stop);
    if (search->run(kHeuristic, kDeadEnds) == Outcome::kFound) found = &search->offsets();
  }
  for (std::size_t i = 0; found != nullptr && i < window.rows.size(); ++i) {
    offsets_[at(window.rows[i])] = (*found)[i];
  }
  return descents;
}

}  // namespace memplan::packing

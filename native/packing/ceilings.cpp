#include "packing/ceilings.hpp"

#include <algorithm>

namespace memplan::packing {

namespace {

std::size_t at(int index) { return static_cast<std::size_t>(index); }

Ceilings::Lowest lower_of(const Ceilings::Lowest& a, const Ceilings::Lowest& b) {
  return b.offset < a.offset ? b : a;
}

}  // namespace

Ceilings::Ceilings(const Problem& problem) : items_(problem.items) {
  std::vector<int> starts{0};
  std::vector<int> fixed;
  for (std::size_t i = 0; i < items_.size(); ++i) {
    if (items_[i].fixed < 0) continue;
    fixed.push_back(static_cast<int>(i));
    starts.push_back(items_[i].first);
    starts.push_back(items_[i].last);
  }
  if (fixed.empty()) return;
  std::sort(starts.begin(), starts.end());
  starts.erase(std::unique(starts.begin(), starts.end()), starts.end());
  zones_ = starts.size();
  while (leaves_ < zones_) leaves_ *= 2;
  zone_of_.resize(at(problem.sections) + 1);
  for (std::size_t zone = 0; zone < zones_; ++zone) {
    const int end = zone + 1 < zones_ ? starts[zone + 1] : problem.sections + 1;
    std::fill(zone_of_.begin() + starts[zone], zone_of_.begin() + end, static_cast<int>(zone));
  }
  std::sort(fixed.begin(), fixed.end(),
            [&](int a, int b) { return items_[at(a)].fixed < items_[at(b)].fixed; });
  stacks_.resize(zones_);
  for (const int item : fixed) {
    const Item& it = items_[at(item)];
    for (int zone = zone_of_[at(it.first)]; zone < zone_of_[at(it.last)]; ++zone) {
      stacks_[at(zone)].push_back(item);
    }
  }
}

void Ceilings::reset() {
  placed_.assign(zones_, 0);
  lowest_.assign(2 * leaves_, {kNone, -1});
  for (std::size_t zone = 0; zone < zones_; ++zone) {
    if (stacks_[zone].empty()) continue;
    const int item = stacks_[zone].front();
    lowest_[leaves_ + zone] = {items_[at(item)].fixed, item};
  }
  for (std::size_t node = leaves_ - 1; node > 0; --node) {
    lowest_[node] = lower_of(lowest_[2 * node], lowest_[2 * node + 1]);
  }
}

// It is the lowest that is left in each of its zones.
void Ceilings::place(int item) {
  const Item& it = items_[at(item)];
  for (int zone = zone_of_[at(it.first)]; zone < zone_of_[at(it.last)]; ++zone) {
    settle(at(zone));
  }
}

void Ceilings::settle(std::size_t zone) {
  const std::size_t next = ++placed_[zone];
  const int item = next < stacks_[zone].size() ? stacks_[zone][next] : -1;
  std::size_t node = leaves_ + zone;
  lowest_[node] = {item < 0 ? kNone : items_[at(item)].fixed, item};
  for (node /= 2; node > 0; node /= 2) {
    lowest_[node] = lower_of(lowest_[2 * node], lowest_[2 * node + 1]);
  }
}

Ceilings::Lowest Ceilings::lowest(int first, int last) const {
  Lowest found{kNone, -1};
  if (!any()) return found;
  std::size_t low = leaves_ + at(zone_of_[at(first)]);
  std::size_t high = leaves_ + at(zone_of_[at(last - 1)]) + 1;
  for (; low < high; low /= 2, high /= 2) {
    if (low % 2 == 1) found = lower_of(found, lowest_[low++]);
    if (high % 2 == 1) found = lower_of(found, lowest_[--high]);
  }
  return found;
}

}  // namespace memplan::packing

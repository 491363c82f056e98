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
  for (std::size_t i = 0; i < items_.size(); ++i) {
    if (items_[i].fixed < 0 && items_[i].twin < 0) continue;
    if (items_[i].fixed >= 0) fixed_.push_back(static_cast<int>(i));
    starts.push_back(items_[i].first);
    starts.push_back(items_[i].last);
  }
  if (starts.size() == 1) return;
  std::sort(starts.begin(), starts.end());
  starts.erase(std::unique(starts.begin(), starts.end()), starts.end());
  zones_ = starts.size();
  while (leaves_ < zones_) leaves_ *= 2;
  zone_of_.resize(at(problem.sections) + 1);
  for (std::size_t zone = 0; zone < zones_; ++zone) {
    const int end = zone + 1 < zones_ ? starts[zone + 1] : problem.sections + 1;
    std::fill(zone_of_.begin() + starts[zone], zone_of_.begin() + end, static_cast<int>(zone));
  }
  std::sort(fixed_.begin(), fixed_.end(),
            [&](int a, int b) { return items_[at(a)].fixed < items_[at(b)].fixed; });
  offset_.assign(items_.size(), -1);
}

void Ceilings::reset() {
  stacks_.assign(zones_, {});
  lowest_.assign(2 * leaves_, {kNone, -1});
  for (const int item : fixed_) decide(item, items_[at(item)].fixed);
}

void Ceilings::decide(int item, std::int64_t offset) {
  const Item& it = items_[at(item)];
  offset_[at(item)] = offset;
  for (std::size_t zone = zone_at(it.first); zone < zone_at(it.last); ++zone) {
    std::vector<int>& stack = stacks_[zone];
    const auto place = std::find_if(stack.begin(), stack.end(),
                                    [&](int other) { return offset_[at(other)] < offset; });
    stack.insert(place, item);
    settle(zone);
  }
}

void Ceilings::place(int item) {
  const Item& it = items_[at(item)];
  for (std::size_t zone = zone_at(it.first); zone < zone_at(it.last); ++zone) {
    stacks_[zone].pop_back();
    settle(zone);
  }
}

void Ceilings::settle(std::size_t zone) {
  const int item = stacks_[zone].empty() ? -1 : stacks_[zone].back();
  std::size_t node = leaves_ + zone;
  lowest_[node] = {item < 0 ? kNone : offset_[at(item)], item};
  for (node /= 2; node > 0; node /= 2) {
    lowest_[node] = lower_of(lowest_[2 * node], lowest_[2 * node + 1]);
  }
}

std::int64_t Ceilings::clear_from(int item, std::int64_t offset) const {
  const Item& it = items_[at(item)];
  offset = align_up(offset, it.alignment);
  for (bool moved = true; moved;) {
    moved = false;
    for (std::size_t zone = zone_at(it.first); zone < zone_at(it.last); ++zone) {
      const std::vector<int>& stack = stacks_[zone];
      for (auto other = stack.rbegin(); other != stack.rend(); ++other) {
        const std::int64_t begin = offset_[at(*other)];
        const std::int64_t end = begin + items_[at(*other)].size;
        if (begin >= offset + it.size) break;
        if (end <= offset) continue;
        offset = align_up(end, it.alignment);
        moved = true;
      }
    }
  }
  return offset;
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

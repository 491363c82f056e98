#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace memplan::packing {

// The floors of sections, which only rise: a stretch is raised to one height, and the highest of a
// stretch is asked for. O(log n) each.
class FloorTree {
 public:
  void reset(int sections) {
    size_ = 1;
    while (size_ < static_cast<std::size_t>(sections)) size_ *= 2;
    highest_.assign(2 * size_, 0);
    all_.assign(2 * size_, 0);
  }

  void raise(int begin, int end, std::int64_t floor) {
    raise(1, 0, size_, static_cast<std::size_t>(begin), static_cast<std::size_t>(end), floor);
  }

  std::int64_t highest(int begin, int end) const {
    return highest(1, 0, size_, static_cast<std::size_t>(begin), static_cast<std::size_t>(end));
  }

 private:
  void raise(std::size_t node, std::size_t low, std::size_t high, std::size_t begin,
             std::size_t end, std::int64_t floor) {
    if (end <= low || high <= begin) return;
    highest_[node] = std::max(highest_[node], floor);
    if (begin <= low && high <= end) {
      all_[node] = floor;
      return;
    }
    const std::size_t middle = (low + high) / 2;
    raise(2 * node, low, middle, begin, end, floor);
    raise(2 * node + 1, middle, high, begin, end, floor);
  }

  std::int64_t highest(std::size_t node, std::size_t low, std::size_t high, std::size_t begin,
                       std::size_t end) const {
    if (end <= low || high <= begin) return 0;
    if (begin <= low && high <= end) return highest_[node];
    const std::size_t middle = (low + high) / 2;
    return std::max({all_[node], highest(2 * node, low, middle, begin, end),
                     highest(2 * node + 1, middle, high, begin, end)});
  }

  std::size_t size_ = 1;
  std::vector<std::int64_t> highest_;
  std::vector<std::int64_t> all_;  // every section below has at least this floor
};

}  // namespace memplan::packing

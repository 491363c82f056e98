#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

namespace memplan::packing {

// Values of sections under range addition, and where the least of a range is. O(log n) each.
class SlackTree {
 public:
  void reset(const std::vector<std::int64_t>& values) {
    size_ = 1;
    while (size_ < values.size()) size_ *= 2;
    least_.assign(2 * size_, std::numeric_limits<std::int64_t>::max() / 2);
    added_.assign(2 * size_, 0);
    for (std::size_t i = 0; i < values.size(); ++i) least_[size_ + i] = values[i];
    for (std::size_t node = size_ - 1; node > 0; --node) {
      least_[node] = std::min(least_[2 * node], least_[2 * node + 1]);
    }
  }

  void add(int begin, int end, std::int64_t value) {
    add(1, 0, size_, static_cast<std::size_t>(begin), static_cast<std::size_t>(end), value);
  }

  // The leftmost place of the least value in [begin, end), and that value.
  std::pair<int, std::int64_t> least(int begin, int end) const {
    Best best{0, 0, 0, std::numeric_limits<std::int64_t>::max()};
    find(1, 0, size_, static_cast<std::size_t>(begin), static_cast<std::size_t>(end), 0, best);
    if (best.node == 0) return {-1, best.value};
    std::size_t node = best.node;
    std::size_t low = best.low;
    for (std::size_t half = best.width / 2; node < size_; half /= 2) {
      node *= 2;
      if (least_[node + 1] < least_[node]) {
        ++node;
        low += half;
      }
    }
    return {static_cast<int>(low), best.value};
  }

 private:
  void add(std::size_t node, std::size_t low, std::size_t high, std::size_t begin, std::size_t end,
           std::int64_t value) {
    if (end <= low || high <= begin) return;
    if (begin <= low && high <= end) {
      least_[node] += value;
      added_[node] += value;
      return;
    }
    const std::size_t middle = (low + high) / 2;
    add(2 * node, low, middle, begin, end, value);
    add(2 * node + 1, middle, high, begin, end, value);
    least_[node] = std::min(least_[2 * node], least_[2 * node + 1]) + added_[node];
  }

  // Of the nodes that make up a range, the leftmost with the least value below it.
  struct Best {
    std::size_t node;  // 0: none
    std::size_t low;
    std::size_t width;  // places below it
    std::int64_t value;
  };

  void find(std::size_t node, std::size_t low, std::size_t high, std::size_t begin,
            std::size_t end, std::int64_t above, Best& best) const {
    if (end <= low || high <= begin || least_[node] + above >= best.value) return;
    if (begin <= low && high <= end) {
      best = {node, low, high - low, least_[node] + above};
      return;
    }
    const std::size_t middle = (low + high) / 2;
    const std::int64_t below = above + added_[node];
    find(2 * node, low, middle, begin, end, below, best);
    find(2 * node + 1, middle, high, begin, end, below, best);
  }

  std::size_t size_ = 1;
  std::vector<std::int64_t> least_;
  std::vector<std::int64_t> added_;
};

}  // namespace memplan::packing

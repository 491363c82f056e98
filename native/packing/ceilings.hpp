#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "packing/problem.hpp"

namespace memplan::packing {

// The lowest of the fixed buffers that are not placed yet, over any stretch of sections. Time is
// cut into zones where a fixed buffer begins or ends: memory is their number squared at worst, a
// question O(log zones).
class Ceilings {
 public:
  static constexpr std::int64_t kNone = std::numeric_limits<std::int64_t>::max();

  explicit Ceilings(const Problem& problem);

  bool any() const { return zones_ > 0; }

  // None is placed.
  void reset();
  void place(int item);

  struct Lowest {
    std::int64_t offset;  // kNone: no fixed buffer is left there
    int item;
  };
  // Over the sections [first, last).
  Lowest lowest(int first, int last) const;

 private:
  void settle(std::size_t zone);

  const std::vector<Item>& items_;
  std::size_t zones_ = 0;
  std::size_t leaves_ = 1;
  std::vector<int> zone_of_;                // by section
  std::vector<std::vector<int>> stacks_;    // by zone: its fixed buffers, lowest first
  std::vector<std::size_t> placed_;         // by zone: how many of them
  std::vector<Lowest> lowest_;              // a tree over zones; the root is 1
};

}  // namespace memplan::packing

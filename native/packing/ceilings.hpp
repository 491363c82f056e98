#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "packing/problem.hpp"

namespace memplan::packing {

// The buffers whose offsets are decided and that are not placed yet: those that are fixed, and twins
// once one of them has been chosen. Which is the lowest over a stretch of sections? Time is cut into
// zones where such a buffer begins or ends: memory is their number squared at worst, a question
// O(log zones).
class Ceilings {
 public:
  static constexpr std::int64_t kNone = std::numeric_limits<std::int64_t>::max();

  explicit Ceilings(const Problem& problem);

  bool any() const { return zones_ > 0; }

  // The fixed buffers, none of them placed.
  void reset();
  void decide(int item, std::int64_t offset);
  // The lowest that is left in each of its zones has been placed.
  void place(int item);
  // The least multiple of the item's alignment from `offset` on at which it meets none of them.
  std::int64_t clear_from(int item, std::int64_t offset) const;

  struct Lowest {
    std::int64_t offset;  // kNone: nothing is decided there
    int item;
  };
  // Over the sections [first, last).
  Lowest lowest(int first, int last) const;

 private:
  void settle(std::size_t zone);
  std::size_t zone_at(int section) const {
    return static_cast<std::size_t>(zone_of_[static_cast<std::size_t>(section)]);
  }

  const std::vector<Item>& items_;
  std::size_t zones_ = 0;
  std::size_t leaves_ = 1;
  std::vector<int> zone_of_;                // by section
  std::vector<int> fixed_;                  // lowest first
  std::vector<std::int64_t> offset_;        // by item
  std::vector<std::vector<int>> stacks_;    // by zone: what is decided there, highest first
  std::vector<Lowest> lowest_;              // a tree over zones; the root is 1
};

}  // namespace memplan::packing

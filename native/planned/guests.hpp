#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <vector>

#include "planned/cells.hpp"
#include "planned/plan.hpp"

namespace memplan::planned {

// Requests in an arena that are not at a planned place: dynamic and unforeseen ones. They take part
// of a cell, or of several.
class Guests {
 public:
  struct Guest {
    std::int64_t end;
    std::int32_t stream;
  };
  struct Gap {
    std::int64_t offset = -1;
    std::int64_t bytes = std::numeric_limits<std::int64_t>::max();
  };

  explicit Guests(const Plan& plan)
      : plan_(plan), cells_(plan.cells()), counts_(static_cast<std::size_t>(plan.cells()), 0) {}

  void add(std::int64_t offset, std::int64_t bytes, std::int32_t stream);
  // False where none begins at `offset`.
  bool remove(std::int64_t offset, Guest& gone);

  // Whether cells [first, last) have none, not even in part.
  bool none(std::int32_t first, std::int32_t last) const { return cells_.none(first, last); }
  bool empty() const { return guests_.empty(); }
  bool touch(std::int64_t lower, std::int64_t upper) const;
  // Replaces `best` by the smallest gap of at least `bytes` that they leave in the cells
  // [first, last), where that is smaller.
  void find_gap(std::int32_t first, std::int32_t last, std::int64_t bytes, Gap& best) const;

 private:
  const Plan& plan_;
  Cells cells_;
  std::vector<std::int32_t> counts_;       // By cell.
  std::map<std::int64_t, Guest> guests_;   // By offset.
};

}  // namespace memplan::planned

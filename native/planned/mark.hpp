#pragma once

#include <algorithm>
#include <cstdint>

#include "planned/plan.hpp"

namespace memplan::planned {

// Reserved memory that a plan takes: before more is, what is unused is given back. A round that
// gives back several times the arena thrashes: then the mark rises.
class Mark {
 public:
  // What is reserved already stays; the plan adds the pages of its arena, in a round those that the
  // round needs, and what it gives no place.
  void set(const Plan& plan, bool in_round, std::int64_t page, std::int64_t reserved);
  std::int64_t exceeded_by(std::int64_t reserved) const { return reserved - bytes_; }
  // Whether what is unused is given back for request number `serial`; else the mark rises.
  bool stays(const Plan& plan, std::int64_t serial);
  // So much was given back.
  void given(std::int64_t bytes) { lap_given_ += bytes; }
  void rise(std::int64_t bytes) { bytes_ += std::max<std::int64_t>(bytes, 0); }

 private:
  std::int64_t bytes_ = 0;
  // Given back since request `lap_begin_`.
  std::int64_t lap_begin_ = 0, lap_given_ = 0;
};

}  // namespace memplan::planned

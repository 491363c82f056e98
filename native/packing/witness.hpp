#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "packing/problem.hpp"

namespace memplan::packing {

// Two buffers fixed where they overlap, or one fixed where it cannot be; empty: none.
std::vector<int> fixed_clash(const Problem& problem);

// The fewest buffers of one moment that are together bigger than the capacity (in units of the
// problem), or the one fixed above it; empty: there are none.
std::vector<int> overload(const Problem& problem, std::int64_t capacity);

// Of buffers that are proved not to fit in `capacity` bytes, fewer that do not fit either: what
// the exact search can do without, as far as it is quick to tell.
std::vector<int> least_witness(const Columns& columns, std::int64_t capacity,
                               const std::atomic<bool>& stop);

}  // namespace memplan::packing

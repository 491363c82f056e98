#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "packing/problem.hpp"

namespace memplan::packing {

// The fixed buffers, then the others in order of score, the best first, each at the least offset
// that is free over its lifetime. O(n²) and more; it knows no twins. Sizes that divide one another
// leave the largest ones no gap that the others do not fill, which no dive sees to.
//
// Fills `offsets`; returns the height, -1 when stopped.
std::int64_t first_fit(const Problem& problem, const std::vector<double>& score,
                       const std::atomic<bool>& stop, std::vector<std::int64_t>& offsets);

}  // namespace memplan::packing

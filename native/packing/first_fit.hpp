#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "packing/problem.hpp"

namespace memplan::packing {

// Each buffer in turn, by descending score, at the lowest place free over its lifetime; those with
// a fixed offset first. Returns the height, -1 when stopped. O(n * overlaps * log).
//
// The one layout here that places below what is already placed, so the one for fixed offsets.
std::int64_t first_fit(const Problem& problem, const std::vector<double>& score,
                       const std::atomic<bool>& stop, std::vector<std::int64_t>& offsets);

}  // namespace memplan::packing

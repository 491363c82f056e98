#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "recompute/model.hpp"

namespace memplan::recompute {

struct SearchSettings {
  std::int64_t budget_bytes = 0;  // Beside the graph's base bytes; 0 searches for the least peak.
  double byte_price = 0.0;        // Seconds that a byte above the budget costs.
  double start_temperature = 0.0;  // In seconds.
  double end_temperature = 0.0;
  std::int64_t iterations = 0;
  std::uint64_t seed = 0;
  double deadline_seconds = 0.0;  // Processor seconds of the process, from the call on.
};

// Simulated annealing over which values are dropped, in which groups, and which are held; then
// single changes until none helps. Only values in `drops` and `holds` change; both are ascending in
// the order in which forward makes them. `group` and `held` are the start and become the best found:
// the least bytes above the budget, then the fewest seconds. Returns what the best does.
Outcome search(Model& model, const SearchSettings& settings, std::span<const Value> drops,
               std::span<const Value> holds, std::span<std::int32_t> group,
               std::span<std::uint8_t> held);

}  // namespace memplan::recompute

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "planned/c_api.h"

namespace memplan::planned {

// The columns of a plan that a test program makes.
struct PlanColumns {
  std::vector<std::int64_t> bytes, stream, phase, lower, upper, offset, space;
  std::vector<std::int64_t> space_lower, space_upper, space_ranges, ranges;
  std::int64_t setup = 0, start = 0, clock = 0, arena_bytes = 0, phases = 0;

  std::size_t size() const { return bytes.size(); }

  // Valid while the columns are.
  memplan_plan columns() const {
    memplan_plan plan{};
    plan.abi = MEMPLAN_ABI;
    plan.requests = static_cast<std::int64_t>(size());
    plan.setup = setup;
    plan.start = start;
    plan.clock = clock;
    plan.arena_bytes = arena_bytes;
    plan.phases = phases;
    plan.bytes = bytes.data();
    plan.stream = stream.data();
    plan.phase = phase.data();
    plan.lower = lower.data();
    plan.upper = upper.data();
    plan.offset = offset.data();
    plan.space = space.data();
    plan.spaces = static_cast<std::int64_t>(space_lower.size());
    plan.space_lower = space_lower.data();
    plan.space_upper = space_upper.data();
    plan.space_ranges = space_ranges.data();
    plan.ranges = ranges.data();
    return plan;
  }
};

}  // namespace memplan::planned

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "planned/plan_columns.hpp"

namespace memplan::planned {

// A random job of several streams and the plan for it: each row at the lowest place that is free over
// its lifetime, which is all of the time for rows that outlive a round.
struct TorturePlan : PlanColumns {
  // The job's calls over so many rounds: a request's row, or ~row for its release.
  std::vector<std::int64_t> calls(int rounds) const {
    struct Call {
      std::int64_t moment, order, what;
      bool operator<(const Call& other) const {
        return std::pair(moment, order) < std::pair(other.moment, other.order);
      }
    };
    std::vector<Call> all;
    for (std::size_t row = 0; row < size(); ++row) {
      const auto number = static_cast<std::int64_t>(row);
      const bool once = number < setup;
      for (int round = 0; round < (once ? 1 : rounds); ++round) {
        const std::int64_t shift = round * clock;
        all.push_back({lower[row] + shift, number + 1, number});
        if (!once || upper[row] < start + clock) all.push_back({upper[row] + shift, 0, ~number});
      }
    }
    std::sort(all.begin(), all.end());
    std::vector<std::int64_t> calls;
    for (const Call& call : all) calls.push_back(call.what);
    return calls;
  }
};

template <typename Random>
TorturePlan random_plan(Random& random, std::uint64_t streams) {
  constexpr std::int64_t kRows = 120, kSetup = 20, kUnit = 512;
  const auto below = [&random](std::int64_t limit) {
    return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(limit));
  };
  TorturePlan plan;
  plan.setup = kSetup;
  plan.start = kSetup + 1;
  plan.clock = 2 * kRows;
  const std::int64_t end = plan.start + plan.clock;
  std::int64_t space_bytes = 0;
  for (std::int64_t row = 0; row < kRows; ++row) {
    const bool early = row < kSetup;
    const std::int64_t lower = early ? row : plan.start + 2 * (row - kSetup);
    const std::int64_t life = 1 + below(below(8) == 0 ? plan.clock : 40);
    const bool stays = early && below(2) == 0;
    const std::int64_t size = 1 + below(std::int64_t{1} << (9 + below(12)));
    plan.bytes.push_back(size);
    plan.stream.push_back(below(3) == 0 ? below(static_cast<std::int64_t>(streams)) : 0);
    plan.phase.push_back(early ? -1 : 2 * (row - kSetup) / (kRows - kSetup));
    plan.lower.push_back(lower);
    plan.upper.push_back(stays ? end : early ? std::min(lower + life, plan.start) : lower + life);
    const bool dynamic = !early && below(12) == 0 && plan.upper.back() <= end;
    plan.space.push_back(dynamic ? 0 : -1);
    if (dynamic) space_bytes += (size + kUnit - 1) / kUnit * kUnit;
  }
  // The space is a range of its own at the arena's bottom.
  std::vector<std::size_t> placed;
  plan.phases = 2;
  plan.arena_bytes = space_bytes;
  for (std::size_t row = 0; row < plan.size(); ++row) {
    const std::int64_t size = (plan.bytes[row] + kUnit - 1) / kUnit * kUnit;
    if (plan.space[row] >= 0 || below(20) == 0) {
      plan.offset.push_back(-1);
      continue;
    }
    const auto meets = [&](std::size_t other) {
      // What crosses the round's end, and what stays, is kept apart from everything.
      const bool whole = plan.upper[row] >= end || plan.upper[other] >= end;
      return whole || (plan.lower[row] < plan.upper[other] && plan.lower[other] < plan.upper[row]);
    };
    std::vector<std::pair<std::int64_t, std::int64_t>> taken;
    for (const std::size_t other : placed) {
      if (!meets(other)) continue;
      const std::int64_t size_there = (plan.bytes[other] + kUnit - 1) / kUnit * kUnit;
      taken.emplace_back(plan.offset[other], plan.offset[other] + size_there);
    }
    std::sort(taken.begin(), taken.end());
    std::int64_t at = space_bytes;
    for (const auto& [from, to] : taken) {
      if (at + size <= from) break;
      at = std::max(at, to);
    }
    plan.offset.push_back(at);
    plan.arena_bytes = std::max(plan.arena_bytes, at + size);
    placed.push_back(row);
  }
  plan.space_ranges = {0, 0};
  if (space_bytes > 0) {
    plan.space_lower = {plan.start};
    plan.space_upper = {end};
    plan.ranges = {0, space_bytes};
    plan.space_ranges = {0, 1};
  }
  return plan;
}

}  // namespace memplan::planned

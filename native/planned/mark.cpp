#include "planned/mark.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "caching/settings.hpp"
#include "planned/resource.hpp"

namespace memplan::planned {

namespace {

constexpr std::int64_t kLargeSegment = caching::Settings{}.large_segment_size;
constexpr std::int64_t kThrash = 4;  // Arenas given back in a round.

}  // namespace

void Mark::set(const Plan& plan, bool in_round, std::int64_t page, std::int64_t reserved) {
  const std::int64_t count = caching::round_up(plan.arena_bytes(), page) / page;
  std::vector<bool> needed(static_cast<std::size_t>(count), !in_round);
  // Moments and changes of bytes, in the caching allocator's small and large segments.
  std::vector<std::pair<std::int64_t, std::int64_t>> unplaced[2];
  for (std::int32_t at = in_round ? plan.setup() : 0; at < plan.size(); ++at) {
    const Row& row = plan.row(at);
    const Life& life = plan.life(at);
    if (row.offset < 0 && row.space < 0) {
      const std::int64_t size = rounded(row.bytes);
      auto& changes = unplaced[size > caching::kSmallRequest ? 1 : 0];
      changes.emplace_back(life.lower, size);
      changes.emplace_back(life.upper, -size);
    } else if (row.offset >= 0 && row.bytes > 0) {
      const auto last = static_cast<std::size_t>((row.offset + row.bytes - 1) / page);
      for (auto each = static_cast<std::size_t>(row.offset / page); each <= last; ++each) {
        needed[each] = true;
      }
    }
  }
  bytes_ = reserved + page * std::count(needed.begin(), needed.end(), true);
  for (auto& changes : unplaced) {
    const bool small = &changes == &unplaced[0];
    std::sort(changes.begin(), changes.end());
    Counted::Amount beside;
    for (const auto& [moment, change] : changes) beside.add(change);
    bytes_ += caching::round_up(beside.peak, small ? caching::kSmallSegment : kLargeSegment);
  }
}

bool Mark::stays(const Plan& plan, std::int64_t serial) {
  if (serial - lap_begin_ > plan.period()) {
    lap_begin_ = serial;
    lap_given_ = 0;
  }
  return lap_given_ <= kThrash * plan.arena_bytes();
}

}  // namespace memplan::planned

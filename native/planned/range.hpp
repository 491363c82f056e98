#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "planned/arena.hpp"
#include "planned/hardware.hpp"
#include "planned/owners.hpp"
#include "planned/pages.hpp"

namespace memplan::planned {

// An arena and the addresses it lies at.
struct Range {
  // Bytes released that other streams still use: whoever gets them comes after the marks.
  struct Use {
    std::int64_t lower, upper;
    std::vector<std::int32_t> marks;
  };

  Range(std::shared_ptr<const Plan> the_plan, bool in_round);
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

  // False where no addresses are left.
  bool make_pages(Hardware& hardware);
  // Gives back pages that nothing uses, those that the plan needs last first, until it is `enough`
  // bytes; how many. No work may still use what was released in them.
  std::int64_t give_back(std::int64_t enough);

  // Whether any of [lower, upper), which may end beyond the arena, is in use.
  Pages::InUse in_use() const {
    return [this](std::int64_t lower, std::int64_t upper) {
      const std::int64_t end = upper < plan->arena_bytes() ? upper : plan->arena_bytes();
      return lower < end && arena.in_use(lower, end);
    };
  }
  bool holds(std::uint64_t address) const { return address - base < extent; }
  // Who has the planned place that begins there; null where nobody has.
  Owner* holder(std::uint64_t address) {
    if (!holds(address)) return nullptr;
    const std::int32_t cell = plan->cell_at(static_cast<std::int64_t>(address - base));
    if (cell < 0) return nullptr;
    Owner& owner = holders[static_cast<std::size_t>(cell)];
    return owner.address == address ? &owner : nullptr;
  }

  std::shared_ptr<const Plan> plan;
  Arena arena;
  std::unique_ptr<Pages> pages;          // Null until the first place is taken.
  std::uint64_t base = 0, extent = 0;    // Its addresses; no extent without pages.
  std::vector<Owner> holders;            // Of planned places, by their first cell.
  std::deque<Use> uses;
  std::int64_t live = 0;  // Places in use.
};

}  // namespace memplan::planned

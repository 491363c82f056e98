#include "planned/range.hpp"

#include <cstddef>
#include <utility>

namespace memplan::planned {

Range::Range(std::shared_ptr<const Plan> the_plan, bool in_round)
    : plan(std::move(the_plan)),
      arena(plan, in_round),
      holders(static_cast<std::size_t>(plan->cells())) {
  for (std::size_t cell = 0; cell < holders.size(); ++cell) {
    holders[cell].range = this;
    holders[cell].cell = static_cast<std::int32_t>(cell);
  }
}

bool Range::make_pages(Hardware& hardware) {
  if (hardware.page == 0) return false;
  pages = std::make_unique<Pages>(hardware.card, hardware.counted, Form::kArenaPage,
                                  plan->arena_bytes(), hardware.page);
  if (pages->base() == 0) {
    pages.reset();
    return false;
  }
  base = pages->base();
  extent = static_cast<std::uint64_t>(pages->bytes());
  return true;
}

std::int64_t Range::give_back(std::int64_t enough) {
  return pages->give_back(in_use(), enough, arena.needed_last(pages->page(), pages->count()));
}

}  // namespace memplan::planned

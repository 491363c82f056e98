#include "planned/handover.hpp"

#include <algorithm>

namespace memplan::planned {
namespace {

void add_once(std::vector<std::int32_t>& all, std::int32_t one) {
  if (std::find(all.begin(), all.end(), one) == all.end()) all.push_back(one);
}

}  // namespace

void Handover::see(std::int32_t stream) {
  if (std::find(streams_.begin(), streams_.end(), stream) != streams_.end()) return;
  // Until now one stream had every cell, or none had.
  if (streams_.size() == 1) uses_.assign(count_, {streams_[0], kNoSlot});
  streams_.push_back(stream);
}

void Handover::pass(std::int32_t first, std::int32_t last, std::int32_t stream,
                    std::vector<std::int32_t>& after) const {
  for (auto cell = static_cast<std::size_t>(first); cell < static_cast<std::size_t>(last); ++cell) {
    const Use& use = uses_[cell];
    if (use.stream == stream) continue;
    if (use.stream == kSeveral) {
      for (const std::int32_t other : streams_) {
        if (other != stream) add_once(after, -1 - other);
      }
    } else {
      add_once(after, use.slot == kNoSlot ? -1 - use.stream : use.slot);
    }
  }
}

void Handover::leave(std::int32_t first, std::int32_t last, std::int32_t stream, bool whole) {
  first_ = first;
  last_ = last;
  stream_ = stream;
  for (auto cell = static_cast<std::size_t>(first); cell < static_cast<std::size_t>(last); ++cell) {
    Use& use = uses_[cell];
    // Other bytes of a cell shared with another stream may not be ready.
    const bool several = !whole && use.stream != stream;
    use = {several ? kSeveral : stream, kNoSlot};
  }
}

void Handover::released_in(std::int32_t slot) {
  for (auto cell = static_cast<std::size_t>(first_); cell < static_cast<std::size_t>(last_); ++cell) {
    if (uses_[cell].stream == stream_) uses_[cell].slot = slot;
  }
}

}  // namespace memplan::planned

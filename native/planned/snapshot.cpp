// What `memplan_snapshot` shows: segments of the caching allocator, then mapped pages of arenas.
#include <algorithm>
#include <mutex>

#include "planned/device.hpp"

namespace memplan::planned {

namespace {

enum State : std::int32_t { kFree = 0, kInUse = 1, kAwaited = 2 };

}  // namespace

void Device::list_segments(std::vector<memplan_block>& blocks) {
  std::vector<const caching::Block*> sorted;
  hardware_->upstream.allocator().for_each_block(
      [&sorted](const caching::Block& block) { sorted.push_back(&block); });
  std::sort(sorted.begin(), sorted.end(),
            [](const auto* a, const auto* b) { return a->address < b->address; });
  std::int64_t segment = -1;
  for (const caching::Block* block : sorted) {
    if (block->prev == nullptr) ++segment;
    const State state = block->allocated ? kInUse : block->pending > 0 ? kAwaited : kFree;
    blocks.push_back({block->address, block->size, block->requested, segment,
                      hardware_->streams.handle(block->stream), 0, state});
  }
}

void Device::list_arena(Range& range, std::vector<memplan_block>& blocks) {
  if (range.pages == nullptr) return;
  std::vector<const Owner*> owners;
  owners_.for_each([&](const Owner& owner) {
    if (owner.range == &range) owners.push_back(&owner);
  });
  for (const Owner& owner : range.holders) {
    if (owner.address != 0) owners.push_back(&owner);
  }
  std::sort(owners.begin(), owners.end(),
            [](const Owner* a, const Owner* b) { return a->address < b->address; });
  const auto base = static_cast<std::int64_t>(range.base);
  auto next = owners.begin();
  range.pages->for_each_run([&](std::int64_t lower, std::int64_t upper) {
    const std::int64_t segment = blocks.empty() ? 0 : blocks.back().segment + 1;
    std::int64_t at = base + lower;
    const auto gap = [&](std::int64_t until) {
      if (at < until) blocks.push_back({at, until - at, 0, segment, nullptr, 1, kFree});
      at = until;
    };
    for (; next != owners.end(); ++next) {
      const auto address = static_cast<std::int64_t>((*next)->address);
      if (address >= base + upper) break;
      gap(address);
      blocks.push_back({address, (*next)->size(), (*next)->requested, segment,
                        hardware_->streams.handle((*next)->stream), 1, kInUse});
      at = address + (*next)->size();
    }
    gap(base + upper);
  });
}

std::int64_t Device::snapshot(memplan_block* blocks, std::int64_t room) {
  const std::lock_guard guard(lock_);
  std::vector<memplan_block> all;
  if (hardware_ != nullptr) {
    list_segments(all);
    if (current_ != nullptr) list_arena(*current_, all);
    for (const std::unique_ptr<Range>& range : retired_) list_arena(*range, all);
  }
  const auto count = static_cast<std::int64_t>(all.size());
  const std::int64_t written = blocks == nullptr ? 0 : std::clamp<std::int64_t>(room, 0, count);
  std::copy(all.begin(), all.begin() + written, blocks);
  return count;
}

}  // namespace memplan::planned

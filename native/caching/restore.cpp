// The state from before the first event.
#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "caching/allocator.hpp"

namespace memplan::caching {

std::vector<Block*> Allocator::restore(const std::vector<InitialSegment>& segments,
                                       const std::vector<InitialBlock>& blocks) {
  std::vector<Chain> chains(segments.size());
  std::vector<std::int64_t> filled(segments.size(), 0);
  std::vector<Block*> result;
  result.reserve(blocks.size());
  for (const InitialSegment& segment : segments) {
    reserve(segment.bytes);
    if (!segment.expandable && !source_.claim(segment.address, segment.bytes)) {
      throw std::invalid_argument("two initial segments overlap");
    }
  }
  for (const InitialBlock& initial : blocks) {
    const auto row = static_cast<std::size_t>(initial.segment);
    const InitialSegment& segment = segments[row];
    Pool& pool = segment.small ? small_ : large_;
    Block* block = new_block(&pool, &bin_of(pool, segment.stream), segment.stream,
                             segment.address + filled[row], initial.bytes, nullptr);
    filled[row] += initial.bytes;
    if (!chains[row].empty()) link(chains[row].back(), block, nullptr);
    chains[row].push_back(block);
    result.push_back(block);
    if (!initial.in_use) continue;
    block->allocated = true;
    block->requested = initial.requested;
    statistics_.requested += initial.requested;
    statistics_.allocated += block->size;
    statistics_.active += block->size;
  }
  restore_expandable(segments, chains);
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    if (!blocks[i].in_use) insert_free(result[i]);
  }
  return result;
}

// Mapped ranges that follow each other in address, of one stream and pool, are rebuilt as one
// segment where they lie on its pages within one reservation, with the gaps unmapped. Where the
// real reservation began is not known: at the first range.
void Allocator::restore_expandable(const std::vector<InitialSegment>& segments,
                                   const std::vector<Chain>& chains) {
  std::vector<std::size_t> order(segments.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::erase_if(order, [&](std::size_t row) {
    return !segments[row].expandable || chains[row].empty();
  });
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return segments[a].address < segments[b].address;
  });
  ExpandableSegment* segment = nullptr;
  Block* last = nullptr;
  for (const std::size_t row : order) {
    const InitialSegment& initial = segments[row];
    Block* first = chains[row].front();
    const bool joins = segment != nullptr && last->bin == first->bin &&
                       (initial.address - segment->base) % segment->page == 0 &&
                       (last->address + last->size - segment->base) % segment->page == 0 &&
                       initial.address >= last->address + last->size &&
                       source_.is_free(last->address + last->size,
                                          initial.address - last->address - last->size) &&
                       initial.address + initial.bytes <= segment->base + segment->bytes;
    if (joins) {
      link(add_gap(segment, last, initial.address), first, first->next);
    } else {
      if (segment != nullptr) close_expandable(segment, last, initial.address);
      const std::int64_t page = initial.small ? kSmallSegment : settings_.large_segment_size;
      const std::int64_t bytes = round_up(std::max(settings_.reserve_bytes, initial.bytes), page);
      expandable_.push_back(std::make_unique<ExpandableSegment>(initial.address, bytes, page));
      segment = expandable_.back().get();
    }
    for (Block* block : chains[row]) block->expandable = segment;
    last = chains[row].back();
  }
  if (segment != nullptr) close_expandable(segment, last, kUnlimited);
}

// An unmapped block from the end of `last` to `end`; `last` itself when there is no room.
Block* Allocator::add_gap(ExpandableSegment* segment, Block* last, std::int64_t end) {
  const std::int64_t begin = last->address + last->size;
  if (begin >= end) return last;
  Block* gap = new_block(last->pool, last->bin, last->stream, begin, end - begin, segment);
  gap->mapped = false;
  link(last, gap, nullptr);
  gap->bin->unmapped.emplace(begin, gap);
  return gap;
}

// The rest of the reservation, up to `limit` and in whole pages, is unmapped address space.
void Allocator::close_expandable(ExpandableSegment* segment, Block* last, std::int64_t limit) {
  const std::int64_t begin = last->address + last->size;
  std::int64_t end = begin;
  if ((begin - segment->base) % segment->page == 0) {
    const std::int64_t room = std::min(segment->base + segment->bytes, limit) - begin;
    if (room > 0) end = begin + room / segment->page * segment->page;
    if (!source_.is_free(begin, end - begin)) end = begin;
  }
  add_gap(segment, last, end);
  segment->bytes = end - segment->base;
  if (!source_.claim(segment->base, segment->bytes)) {
    throw std::invalid_argument("two initial segments overlap");
  }
}

}  // namespace memplan::caching

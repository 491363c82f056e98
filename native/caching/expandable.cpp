// Expandable segments: one growing range of addresses per stream and pool.
#include <algorithm>

#include "caching/allocator.hpp"

namespace memplan::caching {

namespace {

bool has_room(const Block* block, std::int64_t size) {
  std::int64_t bytes = 0;
  for (; bytes < size && block != nullptr && block->is_cached(); block = block->next) {
    bytes += block->size;
  }
  return bytes >= size;
}

}  // namespace

// The lowest address with room for the request in free and unmapped blocks; maybe a new segment.
// Null when there are no addresses for one.
Block* Allocator::find_expandable(const Request& request) {
  for (const auto& [address, unmapped] : request.bin->unmapped) {
    Block* first = unmapped;
    if (first->prev != nullptr && first->prev->is_cached()) first = first->prev;
    if (has_room(first, request.size)) return first;
  }
  const std::int64_t page = request.pool->small ? kSmallSegment : settings_.large_segment_size;
  const std::int64_t bytes = round_up(std::max(settings_.reserve_bytes, request.size), page);
  const std::int64_t base = source_.place(now_, bytes, request.stream, true);
  if (base == SegmentSource::kNone) return nullptr;
  expandable_.push_back(std::make_unique<ExpandableSegment>(base, bytes, page));
  Block* block = new_block(request.pool, request.bin, request.stream, base, bytes,
                           expandable_.back().get());
  block->mapped = false;
  request.bin->unmapped.emplace(base, block);
  return block;
}

Block* Allocator::grow_expandable(const Request& request) {
  Block* block = find_expandable(request);
  if (block == nullptr) return nullptr;
  if (!block->mapped && !map(block, std::min(block->size, request.size))) return nullptr;
  while (block->size < request.size) {
    // What was mapped so far stays mapped and cached when the device has no more pages.
    Block* next = block->next;
    if (!map(next, std::min(request.size - block->size, next->size))) return nullptr;
    block = next;
  }
  erase_free(block);
  return block;
}

// Maps whole pages for the first `bytes` of an unmapped block and caches it; false when the
// device is out of pages.
bool Allocator::map(Block* block, std::int64_t bytes) {
  const ExpandableSegment& segment = *block->expandable;
  const std::int64_t end = round_up(block->address + bytes - segment.base, segment.page);
  const std::int64_t mapped = std::min(end - (block->address - segment.base), block->size);
  if (settings_.capacity_bytes != kUnlimited &&
      statistics_.reserved + mapped > settings_.capacity_bytes) {
    return false;
  }
  reserve(mapped);
  if (!source_.map(block->address, mapped)) {
    statistics_.reserved -= mapped;
    return false;
  }
  block->bin->unmapped.erase(block->address);
  log(SegmentAction::kMap, *block, block->address, mapped);
  block->mapped = true;
  if (mapped < block->size) {
    Block* rest = new_block(block->pool, block->bin, block->stream, block->address + mapped,
                            block->size - mapped, block->expandable);
    rest->mapped = false;
    link(block, rest, block->next);
    rest->bin->unmapped.emplace(rest->address, rest);
    block->size = mapped;
  }
  merge(block, block->prev);
  merge(block, block->next);
  insert_free(block);
  return true;
}

// Unmaps the whole pages inside a cached block; its ends stay cached.
void Allocator::unmap(Block* block) {
  const ExpandableSegment& segment = *block->expandable;
  const std::int64_t offset = block->address - segment.base;
  const std::int64_t begin = round_up(offset, segment.page);
  const std::int64_t end = (offset + block->size) / segment.page * segment.page;
  if (begin >= end) return;
  erase_free(block);
  const auto keep = [&](std::int64_t from, std::int64_t bytes, Block* before, Block* after) {
    Block* part = new_block(block->pool, block->bin, block->stream, segment.base + from, bytes,
                            block->expandable);
    link(before, part, after);
    insert_free(part);
  };
  if (begin > offset) keep(offset, begin - offset, block->prev, block);
  if (offset + block->size > end) keep(end, offset + block->size - end, block, block->next);
  block->address = segment.base + begin;
  block->size = end - begin;
  block->mapped = false;
  statistics_.reserved -= block->size;
  source_.unmap(block->address, block->size);
  log(SegmentAction::kUnmap, *block, block->address, block->size);
  merge(block, block->prev);
  merge(block, block->next);
  block->bin->unmapped.emplace(block->address, block);
}

void Allocator::release_expandable(Block* block) {
  const ExpandableSegment* segment = block->expandable;
  block->bin->unmapped.erase(block->address);
  source_.release(segment->base, segment->bytes);
  std::erase_if(expandable_, [segment](const auto& other) { return other.get() == segment; });
  delete_block(block);
}

}  // namespace memplan::caching

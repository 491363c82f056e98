#include "caching/allocator.hpp"

#include <iterator>
#include <stdexcept>
#include <utility>

namespace memplan::caching {

Allocator::Allocator(const Settings& settings, std::vector<ObservedSegment> observed,
                     std::function<void()> synchronize)
    : settings_(settings),
      addresses_(std::move(observed)),
      synchronize_(std::move(synchronize)) {}

Bin& Allocator::bin_of(Pool& pool, std::int32_t stream) {
  if (last_bin_ != nullptr && last_pool_ == &pool && last_stream_ == stream) return *last_bin_;
  last_bin_ = &pool.bins.try_emplace(stream, &memory_).first->second;
  last_pool_ = &pool;
  last_stream_ = stream;
  return *last_bin_;
}

Block* Allocator::new_block(Pool* pool, Bin* bin, std::int32_t stream, std::int64_t address,
                            std::int64_t size, ExpandableSegment* expandable) {
  Block* block;
  if (spare_blocks_.empty()) {
    block = &blocks_.emplace_back();
  } else {
    block = spare_blocks_.back();
    spare_blocks_.pop_back();
  }
  block->address = address;
  block->size = size;
  block->pool = pool;
  block->bin = bin;
  block->stream = stream;
  block->expandable = expandable;
  return block;
}

void Allocator::delete_block(Block* block) {
  block->requested = 0;
  block->prev = block->next = nullptr;
  block->allocated = false;
  block->mapped = true;
  spare_blocks_.push_back(block);
}

void Allocator::insert_free(Block* block) {
  block->searches_then = block->pool->searches;
  block->place = block->bin->free.insert({block->size, block->address, block}).first;
}

void Allocator::link(Block* before, Block* block, Block* after) {
  block->prev = before;
  block->next = after;
  if (before != nullptr) before->next = block;
  if (after != nullptr) after->prev = block;
}

// Takes a cached neighbour in the same state of mapping into `block`, which is in no list.
void Allocator::merge(Block* block, Block* neighbour) {
  if (neighbour == nullptr || !neighbour->is_cached() || neighbour->mapped != block->mapped) return;
  if (neighbour->mapped) {
    erase_free(neighbour);
  } else {
    block->bin->unmapped.erase(neighbour->address);
  }
  if (block->prev == neighbour) {
    block->address = neighbour->address;
    link(neighbour->prev, block, block->next);
  } else {
    link(block->prev, block, neighbour->next);
  }
  block->size += neighbour->size;
  delete_block(neighbour);
}

void Allocator::log(SegmentAction action, const Block& block, std::int64_t address,
                    std::int64_t bytes) {
  segment_events_.push_back({now_, bytes, address, block.stream, action});
}

void Allocator::reserve(std::int64_t bytes) {
  if (statistics_.reserved > kMaxTotal - bytes) {
    throw std::overflow_error("the trace asks for more memory than can be counted");
  }
  statistics_.reserved += bytes;
}

void Allocator::lift_limits() {
  settings_.capacity_bytes = kUnlimited;
  settings_.allowed_bytes = kUnlimited;
}

bool Allocator::should_split(const Block& block, std::int64_t size) const {
  const std::int64_t rest = block.size - size;
  if (block.pool->small || settings_.expandable_segments) return rest >= kMinBlock;
  return size < settings_.max_split_size && rest > kSmallRequest;
}

Block* Allocator::malloc(std::int64_t bytes, std::int32_t stream) {
  const std::int64_t size = block_size(settings_, bytes);
  Pool& pool = size <= kSmallRequest ? small_ : large_;
  Request request{size, segment_size(settings_, size), stream, &pool, &bin_of(pool, stream)};
  Block* block = find_free(request);
  if (block == nullptr) {
    if (settings_.allowed_bytes != kUnlimited && settings_.garbage_collection_threshold > 0.0) {
      collect_garbage();
    }
    block = grow(request, false);
    if (block == nullptr && !request.rejected && release_oversize(request)) {
      block = grow(request, false);
    }
    if (block == nullptr && !request.rejected) {
      release_cached();
      block = grow(request, true);
    }
    if (block == nullptr) return nullptr;
  }
  return hand_out(block, request, bytes);
}

// Best fit. Takes the block out of the free list.
Block* Allocator::find_free(const Request& request) {
  if (settings_.allowed_bytes != kUnlimited && settings_.garbage_collection_threshold > 0.0) {
    ++request.pool->searches;
  }
  FreeList& free = request.bin->free;
  auto it = free.lower_bound({request.size, std::numeric_limits<std::int64_t>::min(), nullptr});
  if (it == free.end()) return nullptr;
  if (it->block->expandable != nullptr) {
    if (settings_.expandable_segments) {
      // A block in front of unmapped pages counts with them: prefer the one that can grow least.
      const auto room = [](const Block& block) {
        const bool can_grow = block.next != nullptr && !block.next->mapped;
        return block.size + (can_grow ? block.next->size : 0);
      };
      for (auto next = std::next(it); it->block->expandable != nullptr && next != free.end() &&
                                      room(*next->block) < room(*it->block);
           ++next) {
        it = next;
      }
    } else {
      do {
        ++it;
      } while (it != free.end() && it->block->expandable != nullptr);
      if (it == free.end()) return nullptr;
    }
  }
  Block* block = it->block;
  const std::int64_t limit = settings_.max_split_size;
  if (request.size < limit && block->size >= limit) return nullptr;
  if (request.size >= limit && block->size >= request.size + settings_.max_non_split_rounding) {
    return nullptr;
  }
  free.erase(it);
  return block;
}

// New memory from the device.
Block* Allocator::grow(Request& request, bool retry) {
  if (retry) ++statistics_.alloc_retries;
  const std::int64_t bytes = request.segment_bytes;
  if (settings_.allowed_bytes != kUnlimited &&
      statistics_.reserved + bytes > settings_.allowed_bytes) {
    request.rejected = settings_.throw_on_cudamalloc_oom;
    return nullptr;
  }
  if (settings_.expandable_segments) return grow_expandable(request);
  if (settings_.capacity_bytes != kUnlimited &&
      statistics_.reserved + bytes > settings_.capacity_bytes) {
    return nullptr;
  }
  reserve(bytes);
  const std::int64_t address = addresses_.place(now_, bytes, request.stream, false);
  Block* block = new_block(request.pool, request.bin, request.stream, address, bytes, nullptr);
  log(SegmentAction::kAlloc, *block, address, bytes);
  return block;
}

// The head of `block`, which is in no list, is handed out; the rest is cached if worth a split.
Block* Allocator::hand_out(Block* block, const Request& request, std::int64_t bytes) {
  if (should_split(*block, request.size)) {
    Block* rest = block;
    block = new_block(rest->pool, rest->bin, rest->stream, rest->address, request.size,
                      rest->expandable);
    link(rest->prev, block, rest);
    rest->address += request.size;
    rest->size -= request.size;
    insert_free(rest);
  }
  block->allocated = true;
  block->requested = bytes;
  statistics_.requested += bytes;
  statistics_.allocated += block->size;
  statistics_.active += block->size;
  return block;
}

void Allocator::begin_free(Block* block) {
  block->allocated = false;
  statistics_.allocated -= block->size;
}

void Allocator::complete_free(Block* block) {
  statistics_.requested -= block->requested;
  statistics_.active -= block->size;
  block->requested = 0;
  merge(block, block->prev);
  merge(block, block->next);
  insert_free(block);
}

// Gives back unsplit large blocks of at least average age until the threshold is met.
void Allocator::collect_garbage() {
  const auto threshold = static_cast<std::int64_t>(settings_.garbage_collection_threshold *
                                                   static_cast<double>(settings_.allowed_bytes));
  if (statistics_.reserved <= threshold) return;
  const std::int64_t target = statistics_.reserved - threshold;
  const auto age = [this](const Block& block) {
    return static_cast<std::int32_t>(large_.searches - block.searches_then);
  };
  std::int64_t total_age = 0;
  std::int64_t freeable = 0;
  for (const auto& [stream, bin] : large_.bins) {
    for (const FreeKey& key : bin.free) {
      if (key.block->is_split()) continue;
      total_age += age(*key.block);
      ++freeable;
    }
  }
  std::int64_t reclaimed = 0;
  bool progress = true;
  while (reclaimed < target && progress && freeable > 0) {
    const double oldest = static_cast<double>(total_age) / static_cast<double>(freeable);
    progress = false;
    for (auto& [stream, bin] : large_.bins) {
      for (auto it = bin.free.begin(); it != bin.free.end();) {
        Block* block = (it++)->block;
        if (block->is_split() || block->expandable != nullptr || age(*block) < oldest) continue;
        progress = true;
        reclaimed += block->size;
        total_age -= age(*block);
        --freeable;
        release_segment(block);
      }
    }
  }
}

// With a finite max_split_size: gives back one oversize block that is large enough, or several,
// largest first. True when enough was given back.
bool Allocator::release_oversize(const Request& request) {
  const std::int64_t limit = settings_.max_split_size;
  if (limit == kUnlimited) return false;
  const std::int64_t wanted = std::max(request.size, limit);
  FreeList& free = request.bin->free;
  auto it = free.lower_bound({wanted, std::numeric_limits<std::int64_t>::min(), nullptr});
  if (it != free.end() && it->block->expandable == nullptr) {
    release_segment(it->block);
    return true;
  }
  std::int64_t released = 0;
  while (released < wanted && it != free.begin()) {
    const auto current = std::prev(it);
    if (current->size < limit) break;
    if (current->block->expandable != nullptr) {
      it = current;
      continue;
    }
    released += current->size;
    release_segment(current->block);
  }
  return released >= wanted;
}

void Allocator::release_cached() {
  synchronize_();
  release_pool(large_);
  release_pool(small_);
}

void Allocator::release_pool(Pool& pool) {
  std::vector<Block*> to_unmap;  // Unmapping changes the free lists.
  for (auto& [stream, bin] : pool.bins) {
    for (auto it = bin.free.begin(); it != bin.free.end();) {
      Block* block = (it++)->block;
      if (block->expandable != nullptr) {
        to_unmap.push_back(block);
      } else if (!block->is_split()) {
        release_segment(block);
      }
    }
  }
  for (Block* block : to_unmap) {
    unmap(block);
    if (!block->mapped && !block->is_split()) release_expandable(block);
  }
}

void Allocator::release_segment(Block* block) {
  log(SegmentAction::kFree, *block, block->address, block->size);
  addresses_.release(block->address);
  statistics_.reserved -= block->size;
  erase_free(block);
  delete_block(block);
}

}  // namespace memplan::caching

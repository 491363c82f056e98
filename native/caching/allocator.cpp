#include "caching/allocator.hpp"

#include <limits>
#include <stdexcept>
#include <utility>
#include <vector>

namespace memplan::caching {

namespace {

constexpr std::int64_t kOutsidePage = 2 << 20;  // cuMemCreate's granularity.
constexpr std::int64_t kLowest = std::numeric_limits<std::int64_t>::min();

// Of memory that may be given back: by stream, then as for best fit.
template <typename Visit>
void for_each_free(const Pool& pool, Visit visit) {
  for (const auto& [stream, bin] : pool.bins) {
    if (stream >= kPrivatePools) break;
    for (auto it = bin.free.begin(); it != bin.free.end(); it = bin.free.next(it)) {
      visit(bin.free.at(it).block);
    }
  }
}

}  // namespace

Allocator::Allocator(const Settings& settings, SegmentSource& source,
                     std::function<bool()> synchronize, bool keep_events)
    : settings_(settings),
      source_(source),
      synchronize_(std::move(synchronize)),
      keep_events_(keep_events) {}

Bin& Allocator::bin_of(Pool& pool, std::int32_t stream) {
  if (last_bin_ != nullptr && last_pool_ == &pool && last_stream_ == stream) return *last_bin_;
  last_bin_ = &pool.bins[stream];
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
  block->size = block->requested = 0;
  block->prev = block->next = nullptr;
  block->allocated = false;
  block->mapped = true;
  spare_blocks_.push_back(block);
}

void Allocator::insert_free(Block* block) {
  block->searches_then = block->pool->searches;
  block->bin->free.insert({block->size, block->address, block});
}

void Allocator::erase_free(Block* block) {
  FreeList& free = block->bin->free;
  free.erase(free.lower_bound({block->size, block->address, block}));
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
  if (keep_events_) segment_events_.push_back({now_, bytes, address, block.stream, action});
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

Allocator::Request Allocator::request_for(std::int64_t bytes, std::int32_t stream) {
  const std::int64_t size = block_size(settings_, bytes);
  Pool& pool = size <= kSmallRequest ? small_ : large_;
  return {size, segment_size(settings_, size), stream, &pool, &bin_of(pool, stream)};
}

bool Allocator::has_cached(std::int64_t bytes, std::int32_t stream) {
  const Request request = request_for(bytes, stream);
  return best_fit(request) != request.bin->free.end();
}

Block* Allocator::malloc(std::int64_t bytes, std::int32_t stream) {
  if (stream >= kOutside) {
    const std::int64_t pages = (bytes + kOutsidePage - 1) / kOutsidePage * kOutsidePage;
    const Request request{pages, pages, stream, &large_, &bin_of(large_, stream)};
    Block* block = take_segment(request);
    return block == nullptr ? nullptr : hand_out(block, request, bytes);
  }
  Request request = request_for(bytes, stream);
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

// Takes the best fit out of the free list.
Block* Allocator::find_free(const Request& request) {
  if (settings_.allowed_bytes != kUnlimited && settings_.garbage_collection_threshold > 0.0) {
    ++request.pool->searches;
  }
  FreeList& free = request.bin->free;
  const FreeList::Position it = best_fit(request);
  if (it == free.end()) return nullptr;
  Block* block = free.at(it).block;
  free.erase(it);
  return block;
}

FreeList::Position Allocator::best_fit(const Request& request) const {
  const FreeList& free = request.bin->free;
  FreeList::Position it = free.lower_bound({request.size, kLowest, nullptr});
  if (it == free.end()) return it;
  const auto expandable = [&free](FreeList::Position position) {
    return free.at(position).block->expandable != nullptr;
  };
  if (expandable(it) && settings_.expandable_segments) {
    // A block in front of unmapped pages counts with them: prefer the one that can grow least.
    const auto room = [&free](FreeList::Position position) {
      const Block& block = *free.at(position).block;
      const bool can_grow = block.next != nullptr && !block.next->mapped;
      return block.size + (can_grow ? block.next->size : 0);
    };
    for (auto next = free.next(it);
         expandable(it) && next != free.end() && room(next) < room(it); next = free.next(next)) {
      it = next;
    }
  } else if (expandable(it)) {
    do {
      it = free.next(it);
    } while (it != free.end() && expandable(it));
    if (it == free.end()) return it;
  }
  const Block* block = free.at(it).block;
  const std::int64_t limit = settings_.max_split_size;
  if (request.size < limit && block->size >= limit) return free.end();
  if (request.size >= limit && block->size >= request.size + settings_.max_non_split_rounding) {
    return free.end();
  }
  return it;
}

// New memory from the device.
Block* Allocator::grow(Request& request, bool retry) {
  if (retry) ++statistics_.alloc_retries;
  const std::int64_t bytes = request.segment_bytes;
  if (settings_.allowed_bytes != kUnlimited &&
      own_reserved() + bytes > settings_.allowed_bytes) {
    request.rejected = settings_.throw_on_cudamalloc_oom;
    return nullptr;
  }
  if (settings_.expandable_segments) return grow_expandable(request);
  return take_segment(request);
}

Block* Allocator::take_segment(const Request& request) {
  const std::int64_t bytes = request.segment_bytes;
  if (settings_.capacity_bytes != kUnlimited &&
      statistics_.reserved + bytes > settings_.capacity_bytes) {
    return nullptr;
  }
  reserve(bytes);
  const std::int64_t address = source_.place(now_, bytes, request.stream, false);
  if (address == SegmentSource::kNone) {
    statistics_.reserved -= bytes;
    return nullptr;
  }
  Block* block = new_block(request.pool, request.bin, request.stream, address, bytes, nullptr);
  if (request.stream >= kOutside) outside_ += bytes;
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
  if (block->stream >= kOutside) release_segment(block);
}

// Gives back unsplit large blocks of at least average age until the threshold is met.
void Allocator::collect_garbage() {
  const auto threshold = static_cast<std::int64_t>(settings_.garbage_collection_threshold *
                                                   static_cast<double>(settings_.allowed_bytes));
  if (own_reserved() <= threshold) return;
  const std::int64_t target = own_reserved() - threshold;
  const auto age = [this](const Block& block) {
    return static_cast<std::int32_t>(large_.searches - block.searches_then);
  };
  std::vector<Block*> whole;
  for_each_free(large_, [&whole](Block* block) {
    if (!block->is_split()) whole.push_back(block);
  });
  std::int64_t total_age = 0;
  for (const Block* block : whole) total_age += age(*block);
  auto freeable = static_cast<std::int64_t>(whole.size());
  std::int64_t reclaimed = 0;
  bool progress = true;
  while (reclaimed < target && progress && freeable > 0) {
    const double mean = static_cast<double>(total_age) / static_cast<double>(freeable);
    progress = false;
    std::vector<Block*> kept;
    for (Block* block : whole) {
      if (block->expandable != nullptr || age(*block) < mean) {
        kept.push_back(block);
        continue;
      }
      progress = true;
      reclaimed += block->size;
      total_age -= age(*block);
      --freeable;
      release_segment(block);
    }
    whole = std::move(kept);
  }
}

// With a finite max_split_size: gives back one oversize block that is large enough, or several,
// largest first. True when enough was given back.
bool Allocator::release_oversize(const Request& request) {
  const std::int64_t limit = settings_.max_split_size;
  if (limit == kUnlimited) return false;
  const std::int64_t wanted = std::max(request.size, limit);
  FreeList& free = request.bin->free;
  const FreeKey key{wanted, kLowest, nullptr};
  FreeList::Position it = free.lower_bound(key);
  if (it != free.end() && free.at(it).block->expandable == nullptr) {
    release_segment(free.at(it).block);
    return true;
  }
  std::vector<Block*> oversize;  // Largest last.
  for (auto each = free.lower_bound({limit, kLowest, nullptr}); each != it;
       each = free.next(each)) {
    if (free.at(each).block->expandable == nullptr) oversize.push_back(free.at(each).block);
  }
  std::int64_t released = 0;
  for (; released < wanted && !oversize.empty(); oversize.pop_back()) {
    released += oversize.back()->size;
    release_segment(oversize.back());
  }
  return released >= wanted;
}

void Allocator::release_cached() {
  if (!synchronize_()) return;
  release_pool(large_);
  release_pool(small_);
}

void Allocator::release_pool(Pool& pool) {
  std::vector<Block*> cached;  // Releasing changes the free lists.
  for_each_free(pool, [&cached](Block* block) { cached.push_back(block); });
  for (Block* block : cached) {
    if (block->expandable == nullptr && !block->is_split()) release_segment(block);
  }
  std::erase_if(cached, [](const Block* block) { return block->expandable == nullptr; });
  for (Block* block : cached) {
    unmap(block);
    if (!block->mapped && !block->is_split()) release_expandable(block);
  }
}

void Allocator::release_segment(Block* block) {
  log(SegmentAction::kFree, *block, block->address, block->size);
  source_.release(block->address, block->size);
  statistics_.reserved -= block->size;
  if (block->stream >= kOutside) outside_ -= block->size;
  erase_free(block);
  delete_block(block);
}

}  // namespace memplan::caching

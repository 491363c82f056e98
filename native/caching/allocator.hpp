#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "caching/block.hpp"
#include "caching/segment_source.hpp"
#include "caching/settings.hpp"

namespace memplan::caching {

// Numbers as in memplan.types.trace.EventKind.
enum class SegmentAction : std::uint8_t { kAlloc = 8, kFree = 9, kMap = 10, kUnmap = 11 };

struct SegmentEvent {
  std::int64_t event;
  std::int64_t bytes;
  std::int64_t address;
  std::int32_t stream;
  SegmentAction action;
};

// A block of a segment that existed before the first event.
struct InitialBlock {
  std::int64_t segment;  // Row of the segment.
  std::int64_t bytes;
  std::int64_t requested;
  bool in_use;
};

struct InitialSegment {
  std::int64_t address;
  std::int64_t bytes;
  std::int32_t stream;
  bool small;
  bool expandable;
};

// Current sums in bytes, and counters.
struct Statistics {
  std::int64_t requested = 0;  // As asked for, until the block may be reused.
  std::int64_t allocated = 0;  // Blocks in use by the host.
  std::int64_t active = 0;     // ... or still awaited on another stream.
  std::int64_t reserved = 0;   // Segments and mapped pages.
  std::int64_t alloc_retries = 0;
};

// The rules of DeviceCachingAllocator of torch 2.11 to 2.13 for one device, without private pools.
class Allocator {
 public:
  // `synchronize` must complete every outstanding free: an out-of-memory retry waits for them. Where
  // it returns false nothing is given back to the source.
  // Without `keep_events` no segment events are kept.
  Allocator(const Settings& settings, SegmentSource& source, std::function<bool()> synchronize,
            bool keep_events);

  // Segments from before the first event. Returns the blocks in the order given.
  std::vector<Block*> restore(const std::vector<InitialSegment>& segments,
                              const std::vector<InitialBlock>& blocks);

  // A block of at least `bytes` > 0; nullptr when memory is out after all retries. On a stream from
  // kOutside on: pages that are taken for it alone, for which nothing cached is given back.
  Block* malloc(std::int64_t bytes, std::int32_t stream);
  // Whether a cached block would serve the request, so that no memory is taken for it.
  bool has_cached(std::int64_t bytes, std::int32_t stream);
  // The host lets go; the block stays away from reuse until `complete_free`.
  void begin_free(Block* block);
  void complete_free(Block* block);
  // torch.cuda.empty_cache().
  void release_cached();
  void lift_limits();

  void set_now(std::int64_t event) { now_ = event; }
  const Statistics& statistics() const { return statistics_; }
  const std::vector<SegmentEvent>& segment_events() const { return segment_events_; }
  // Every block, in no order; neighbours in a segment are linked.
  template <typename Visit>
  void for_each_block(Visit visit) const {
    for (const Block& block : blocks_) {
      if (block.size > 0) visit(block);
    }
  }

 private:
  struct Request {
    std::int64_t size;
    std::int64_t segment_bytes;
    std::int32_t stream;
    Pool* pool;
    Bin* bin;
    bool rejected = false;  // throw_on_cudamalloc_oom: no retry.
  };

  Request request_for(std::int64_t bytes, std::int32_t stream);
  FreeList::Position best_fit(const Request& request) const;
  Bin& bin_of(Pool& pool, std::int32_t stream);
  Block* new_block(Pool* pool, Bin* bin, std::int32_t stream, std::int64_t address,
                   std::int64_t size, ExpandableSegment* expandable);
  void delete_block(Block* block);
  static void insert_free(Block* block);
  static void erase_free(Block* block);
  static void link(Block* before, Block* block, Block* after);
  void merge(Block* block, Block* neighbour);

  Block* find_free(const Request& request);
  Block* grow(Request& request, bool retry);
  Block* take_segment(const Request& request);
  std::int64_t own_reserved() const { return statistics_.reserved - outside_; }
  Block* hand_out(Block* block, const Request& request, std::int64_t bytes);
  bool should_split(const Block& block, std::int64_t size) const;

  void collect_garbage();
  bool release_oversize(const Request& request);
  void release_pool(Pool& pool);
  void release_segment(Block* block);

  // Expandable segments, in expandable.cpp.
  Block* find_expandable(const Request& request);
  Block* grow_expandable(const Request& request);
  bool map(Block* block, std::int64_t bytes);
  void unmap(Block* block);
  void release_expandable(Block* block);

  // State from before the first event, in restore.cpp.
  using Chain = std::vector<Block*>;
  void restore_expandable(const std::vector<InitialSegment>& segments,
                          const std::vector<Chain>& chains);
  Block* add_gap(ExpandableSegment* segment, Block* last, std::int64_t end);
  void close_expandable(ExpandableSegment* segment, Block* last, std::int64_t limit);

  void log(SegmentAction action, const Block& block, std::int64_t address, std::int64_t bytes);
  void reserve(std::int64_t bytes);

  Settings settings_;
  SegmentSource& source_;
  std::function<bool()> synchronize_;
  const bool keep_events_;
  std::int64_t now_ = 0;
  Statistics statistics_;
  std::int64_t outside_ = 0;  // Of what is reserved, pages that are not the allocator's.
  std::vector<SegmentEvent> segment_events_;
  Pool small_{true};
  Pool large_{false};
  std::deque<Block> blocks_;
  std::vector<Block*> spare_blocks_;
  std::vector<std::unique_ptr<ExpandableSegment>> expandable_;
  Bin* last_bin_ = nullptr;
  Pool* last_pool_ = nullptr;
  std::int32_t last_stream_ = 0;
};

}  // namespace memplan::caching

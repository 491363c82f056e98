#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "caching/free_list.hpp"

namespace memplan::caching {

struct Pool;

// Streams from here on are private pools (memplan.types.trace.PRIVATE_POOLS).
constexpr std::int32_t kPrivatePools = 1 << 16;
// Streams from here on are memory of the card that is not the allocator's (OUTSIDE, likewise).
constexpr std::int32_t kOutside = 1 << 20;

// One range of virtual addresses whose pages are mapped on demand.
struct ExpandableSegment {
  std::int64_t base;
  std::int64_t bytes;
  std::int64_t page;
};

using UnmappedList = std::map<std::int64_t, Block*>;  // By address.

// The blocks of one stream in one pool that are not in use.
struct Bin {
  FreeList free;
  UnmappedList unmapped;
};

struct Pool {
  explicit Pool(bool is_small) : small(is_small) {}
  const bool small;
  std::int64_t searches = 0;  // Counted while garbage collection is on: the blocks' age.
  std::map<std::int32_t, Bin> bins;  // By stream.
};

// A range of a segment, in use or cached. Neighbours in the same segment are linked.
struct Block {
  std::int64_t address = 0;
  std::int64_t size = 0;
  std::int64_t requested = 0;
  Pool* pool = nullptr;
  Bin* bin = nullptr;
  Block* prev = nullptr;
  Block* next = nullptr;
  ExpandableSegment* expandable = nullptr;
  std::int64_t searches_then = 0;   // Of the pool, when the block was cached.
  std::int32_t stream = 0;
  int pending = 0;                  // Uses by other streams that may not have passed.
  int waiting_slot = -1;            // Position among those that wait for their observed end.
  bool allocated = false;
  bool mapped = true;
  std::vector<std::int32_t> stream_uses;  // Other streams that recorded it.

  bool is_split() const { return prev != nullptr || next != nullptr; }
  bool is_cached() const {
    return !allocated && pending == 0 && waiting_slot < 0 && stream_uses.empty();
  }
};

}  // namespace memplan::caching

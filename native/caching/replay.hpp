#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "caching/allocator.hpp"

namespace memplan::caching {

// Numbers as in memplan.types.trace.EventKind.
enum class EventKind : std::uint8_t {
  kAlloc = 0,
  kFree = 1,
  kFreeCompleted = 2,
  kRecordStream = 3,
  kEventRecord = 4,
  kEventWait = 5,
  kSynchronize = 6,
  kEmptyCache = 7,
  kSegmentAlloc = 8,
  kSegmentMap = 10,
};

// Columns of the events; all spans have one length.
struct EventColumns {
  std::span<const std::uint8_t> kind;
  std::span<const std::int64_t> storage;
  std::span<const std::int64_t> bytes;
  std::span<const std::int64_t> least;  // What the request can do with when there is no more.
  std::span<const std::int32_t> stream;
  std::span<const std::int16_t> device;
  std::span<const std::int64_t> aux;
};

// A storage generation that lives in a block of the initial segments.
struct InitialStorage {
  std::int64_t block;  // Row of the initial block.
  std::int64_t storage;
};

struct ReplayInput {
  EventColumns events;
  std::int64_t storages;  // Generations are below this number.
  std::int16_t device;
  bool reuse_early;  // A recorded stream has passed by the time of the free.
  std::vector<InitialSegment> segments;
  std::vector<InitialBlock> blocks;
  std::vector<InitialStorage> residents;
};

// One entry an event: the state after it, in bytes.
struct ReplayColumns {
  std::span<std::int64_t> requested;
  std::span<std::int64_t> allocated;
  std::span<std::int64_t> active;
  std::span<std::int64_t> reserved;
  std::span<std::int64_t> address;  // Of the block, for kAlloc; else -1.
};

struct ReplaySummary {
  Statistics start;  // Before the first event.
  Statistics end;
  std::int64_t oom_event = -1;  // First request that could not be served; limits end there.
  std::int64_t oom_bytes = 0;
  std::int64_t unknown_frees = 0;  // Frees of storages that were not there.
  std::vector<SegmentEvent> segment_events;
};

// Throws std::invalid_argument, naming the event, for a stream of events that cannot be.
ReplaySummary replay(const Settings& settings, const ReplayInput& input, ReplayColumns out);

}  // namespace memplan::caching

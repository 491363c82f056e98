#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "planned/c_api.h"
#include "planned/hardware.hpp"
#include "planned/lock.hpp"
#include "planned/mark.hpp"
#include "planned/owners.hpp"
#include "planned/range.hpp"
#include "planned/recorder.hpp"

namespace memplan::planned {

// The memory of one device. Every function may be called from any thread.
//
// A request goes to the arena of the plan, if there is one and it has a place, else to the caching
// allocator. Bytes of the arena pass from one stream to another behind an event: recorded where
// they are released, awaited by the stream that gets them.
class Device {
 public:
  explicit Device(int number) : number_(number) {}
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  // Null when memory is out; with `planned_only` also where the plan has no place.
  void* malloc(std::int64_t bytes, Stream stream, bool planned_only);
  // False for a pointer that is not this device's.
  bool free(void* pointer);
  bool record_stream(void* pointer, Stream stream);
  // Whether the address lies in an arena.
  bool owns(const void* pointer);
  void empty_cache();

  // Empty, or why the plan cannot be used.
  std::string load(std::shared_ptr<const Plan> plan, bool in_round);
  // Also gives back what of arenas nothing uses.
  void unload();
  void enter_phase(std::int32_t phase);

  void statistics(memplan_statistics& out);
  void reset_peaks();
  std::int64_t snapshot(memplan_block* blocks, std::int64_t room);

  void record(std::int64_t most);
  void stop_recording();
  std::int64_t take_events(memplan_event* events, std::int64_t room, std::int64_t* lost);
  // What a front end's own allocator served and took back.
  void note_malloc(const void* pointer, std::int64_t bytes, Stream stream);
  void note_free(const void* pointer);
  void mark(std::int64_t number);
  void mark_stream(std::int64_t number, Stream handle);

  // A front end that has an allocator of its own took so much, or, negative, gave it back.
  void count(std::int64_t allocated, std::int64_t requested, std::int64_t reserved);
  // The process uses another device as well, which may read and write this one's memory.
  void add_peer(int device);
  void set_limit(std::int64_t bytes);
  void fail_at(std::int64_t n);
  // Why the last request got no memory.
  std::string reason();

 private:
  // What nothing but the plan has a say in: null, or false, in any other case.
  void* malloc_as_planned(std::int64_t bytes, Stream stream);
  bool free_as_planned(std::uint64_t address);
  void* malloc_otherwise(std::int64_t bytes, Stream stream, bool planned_only);
  bool free_otherwise(std::uint64_t address);

  bool start();
  void grant(int device);
  void* serve(std::int64_t bytes, std::int32_t stream, bool planned_only);
  bool grows_beyond_mark(std::int64_t bytes, std::int32_t stream);
  void* fall_back(std::int64_t bytes, std::int32_t stream);
  void out_of_memory(std::int64_t bytes, std::int32_t stream);
  // The owner of what begins at the address.
  Owner* find(std::uint64_t address);
  template <typename Visit>
  void for_each_owner(Visit visit);
  Owner& new_owner(Range& range, const Place& place);
  void admit(Owner& owner, std::int64_t bytes, std::int32_t stream);

  bool order(Range& range, const Place& place, std::int64_t upper, std::int32_t stream);
  bool map(Range& range, std::int64_t lower, std::int64_t upper);
  void make_room(std::int64_t bytes);
  void take_back(Owner& owner);
  void leave_uses(Range& range, const Owner& owner);
  void release(Range& range, std::int64_t offset, std::int32_t cell, std::int32_t stream);
  void pass_on(Range& range, std::int64_t offset, std::int32_t stream);
  void forget_passed(Range& range);

  // Unused pages of all arenas, at least so many bytes if there are; how many.
  std::int64_t give_back_pages(std::int64_t enough);
  void retire();
  void drop_retired();

  void list_segments(std::vector<memplan_block>& blocks);
  void list_arena(Range& range, std::vector<memplan_block>& blocks);

  const int number_;
  Lock lock_;
  std::unique_ptr<Hardware> hardware_;  // Null until the first request.
  std::unique_ptr<Range> current_;      // Of the plan; null without one.
  std::vector<std::unique_ptr<Range>> retired_;  // Of plans before; some places are in use.
  std::int64_t serial_ = 0, frees_ = 0, hits_ = 0, dynamic_ = 0, adopted_ = 0, misses_ = 0;
  Counted::Amount allocated_, requested_, fallback_;
  Recorder recorder_;
  Owners owners_;  // Of all but planned places.
  Owners noted_;   // Of what a front end's own allocator serves.
  std::unordered_map<std::uint64_t, std::vector<std::int32_t>> shared_;  // Streams by address.
  Mark mark_;
  std::int64_t resyncs_ = 0;  // Of plans before.
  std::int64_t retries_ = 0, ooms_ = 0;
  std::int64_t limit_ = -1, fail_at_ = 0;  // For the hardware, when it is there,
  std::vector<int> peers_;                 // as these.
};

template <typename Visit>
void Device::for_each_owner(Visit visit) {
  owners_.for_each(visit);
  noted_.for_each(visit);
  const auto visit_holders = [&visit](Range& range) {
    for (Owner& owner : range.holders) {
      if (owner.address != 0) visit(owner);
    }
  };
  if (current_ != nullptr) visit_holders(*current_);
  for (const std::unique_ptr<Range>& range : retired_) visit_holders(*range);
}

}  // namespace memplan::planned

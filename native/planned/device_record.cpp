// What a device tells: statistics, what is recorded of it, marks in that.
#include "planned/device.hpp"

#include <mutex>

namespace memplan::planned {

void Device::statistics(memplan_statistics& out) {
  const std::lock_guard guard(lock_);
  out = {};
  out.allocated = allocated_.now;
  out.allocated_peak = allocated_.peak;
  out.requested = requested_.now;
  out.requested_peak = requested_.peak;
  out.fallback_bytes = fallback_.now;
  out.fallback_peak = fallback_.peak;
  out.mallocs = serial_;
  out.frees = frees_;
  out.hits = hits_;
  out.dynamic = dynamic_;
  out.adopted = adopted_;
  out.misses = misses_;
  out.resyncs = resyncs_ + (current_ != nullptr ? current_->arena.counters().resyncs : 0);
  out.retries = retries_;
  out.ooms = ooms_;
  if (hardware_ == nullptr) return;
  const Counted& counted = hardware_->counted;
  out.reserved = counted.all().now;
  out.reserved_peak = counted.all().peak;
  out.arena_mapped = counted.arenas().now;
  out.arena_peak = counted.arenas().peak;
  out.upstream_reserved = counted.segments().now;
  out.retries += hardware_->upstream.statistics().alloc_retries;
  out.waits = hardware_->marks.waits();
}

void Device::reset_peaks() {
  const std::lock_guard guard(lock_);
  for (Counted::Amount* amount : {&allocated_, &requested_, &fallback_}) {
    amount->peak = amount->now;
  }
  if (hardware_ != nullptr) hardware_->counted.reset_peaks();
}

std::string Device::reason() {
  const std::lock_guard guard(lock_);
  if (hardware_ == nullptr) return driver_error();
  const Result last = hardware_->memory.last();
  return last == kSuccess || last == kOutOfMemory ? "" : name_of(hardware_->card.driver, last);
}

void Device::count(std::int64_t allocated, std::int64_t requested, std::int64_t reserved) {
  const std::lock_guard guard(lock_);
  allocated_.add(allocated);
  requested_.add(requested);
  if (hardware_ != nullptr || start()) hardware_->counted.add_foreign(reserved);
}

void Device::set_limit(std::int64_t bytes) {
  const std::lock_guard guard(lock_);
  limit_ = bytes;
  if (hardware_ != nullptr) hardware_->limit.set(bytes);
}

void Device::fail_at(std::int64_t n) {
  const std::lock_guard guard(lock_);
  fail_at_ = n;
  if (hardware_ != nullptr) hardware_->failure.set(n);
}

// ---- Recording ---------------------------------------------------------------------------------

void Device::record(std::int64_t most) {
  const std::lock_guard guard(lock_);
  recorder_.start(most);
  std::vector<Owner*> alive;
  for_each_owner([&alive](Owner& owner) { alive.push_back(&owner); });
  std::sort(alive.begin(), alive.end(),
            [](const Owner* a, const Owner* b) { return a->serial < b->serial; });
  for (Owner* owner : alive) {
    owner->storage = recorder_.next_storage();
    recorder_.add(MEMPLAN_EVENT_ALLOC, owner->requested, owner->storage, owner->stream);
  }
}

void Device::stop_recording() {
  const std::lock_guard guard(lock_);
  recorder_.stop();
}

std::int64_t Device::take_events(memplan_event* events, std::int64_t room, std::int64_t* lost) {
  const std::lock_guard guard(lock_);
  return recorder_.take(events, room, lost);
}

void Device::note_malloc(const void* pointer, std::int64_t bytes, Stream handle) {
  const std::lock_guard guard(lock_);
  if (pointer == nullptr || (hardware_ == nullptr && !start())) return;
  if (Owner* stale = noted_.find(address_of(pointer))) noted_.erase(stale);
  Owner& owner = noted_.insert(address_of(pointer));
  owner.requested = bytes;
  owner.serial = serial_;
  owner.stream = hardware_->streams.number(handle);
  if (!recorder_.on()) return;
  owner.storage = recorder_.next_storage();
  recorder_.add(MEMPLAN_EVENT_ALLOC, bytes, owner.storage, owner.stream);
}

void Device::note_free(const void* pointer) {
  const std::lock_guard guard(lock_);
  Owner* owner = noted_.find(address_of(pointer));
  if (owner == nullptr) return;
  if (recorder_.on()) {
    recorder_.add(MEMPLAN_EVENT_FREE, owner->requested, owner->storage, owner->stream);
  }
  noted_.erase(owner);
}

void Device::mark(std::int64_t number) {
  const std::lock_guard guard(lock_);
  if (recorder_.on()) recorder_.add(MEMPLAN_EVENT_PHASE, number, -1, 0);
}

void Device::mark_stream(std::int64_t number, Stream handle) {
  const std::lock_guard guard(lock_);
  if (!recorder_.on() || hardware_ == nullptr) return;
  recorder_.add(MEMPLAN_EVENT_PHASE, number, -1, hardware_->streams.known(handle));
}

}  // namespace memplan::planned

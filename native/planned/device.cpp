#include "planned/device.hpp"

#include <algorithm>
#include <limits>
#include <mutex>
#include <utility>


namespace memplan::planned {

namespace {

constexpr std::int64_t kAtOnce = 128;  // Part of the arena that is given back at the least.
constexpr std::int64_t kAll = std::numeric_limits<std::int64_t>::max();

}  // namespace

bool Device::start() {
  std::string why;
  hardware_ = Hardware::start(number_, why);
  if (hardware_ == nullptr) {
    set_driver_error(why);
    return false;
  }
  hardware_->limit.set(limit_);
  hardware_->failure.set(fail_at_);
  for (const int peer : peers_) grant(peer);
  return true;
}

void Device::add_peer(int device) {
  const std::lock_guard guard(lock_);
  peers_.push_back(device);
  if (hardware_ != nullptr) grant(device);
}

void Device::grant(int device) {
  Card& card = hardware_->card;
  DeviceNumber peer = 0;
  int can = 0;
  if (card.driver.device_get(&peer, device) != kSuccess ||
      card.driver.can_access_peer(&can, peer, card.number) != kSuccess || can == 0) {
    return;
  }
  card.peers.push_back(peer);
  hardware_->upstream.grant(peer);
  if (current_ != nullptr && current_->pages != nullptr) current_->pages->grant(peer);
  for (const std::unique_ptr<Range>& range : retired_) {
    if (range->pages != nullptr) range->pages->grant(peer);
  }
}

// ---- Requests ----------------------------------------------------------------------------------

void* Device::malloc(std::int64_t bytes, Stream handle, bool planned_only) {
  const std::lock_guard guard(lock_);
  if (void* pointer = malloc_as_planned(bytes, handle)) return pointer;
  return malloc_otherwise(bytes, handle, planned_only);
}

bool Device::free(void* pointer) {
  const std::lock_guard guard(lock_);
  return free_as_planned(address_of(pointer)) || free_otherwise(address_of(pointer));
}

inline void* Device::malloc_as_planned(std::int64_t bytes, Stream handle) {
  if (current_ == nullptr || recorder_.on()) return nullptr;
  Range& range = *current_;
  if (range.pages == nullptr || !range.uses.empty()) return nullptr;
  const std::int32_t stream = hardware_->streams.number(handle);
  const Row* row = range.arena.expected(bytes, stream);
  const std::int64_t size = rounded(bytes);
  if (row == nullptr || !range.pages->ready(row->offset, row->offset + size)) return nullptr;
  range.arena.take_expected(*row);
  ++hits_;
  ++range.live;
  allocated_.add(size);
  requested_.add(bytes);
  Owner& owner = range.holders[static_cast<std::size_t>(row->first)];
  owner.address = range.base + static_cast<std::uint64_t>(row->offset);
  owner.requested = bytes;
  owner.serial = ++serial_;
  owner.stream = stream;
  return pointer_to(owner.address);
}

inline bool Device::free_as_planned(std::uint64_t address) {
  if (current_ == nullptr || recorder_.on()) return false;
  Range& range = *current_;
  Owner* owner = range.holder(address);
  if (owner == nullptr || owner->shared) return false;
  ++frees_;
  --range.live;
  allocated_.remove(rounded(owner->requested));
  requested_.remove(owner->requested);
  owner->address = 0;
  if (range.arena.release_row(owner->cell)) {
    pass_on(range, static_cast<std::int64_t>(address - range.base), owner->stream);
  }
  return true;
}

void* Device::malloc_otherwise(std::int64_t bytes, Stream handle, bool planned_only) {
  if (bytes <= 0) return nullptr;
  if (hardware_ == nullptr && !start()) return nullptr;
  const std::int32_t stream = hardware_->streams.number(handle);
  ++serial_;
  void* pointer = nullptr;
  if (bytes <= caching::kMaxRequest) {
    if (current_ != nullptr) pointer = serve(bytes, stream, planned_only);
    if (pointer == nullptr && !planned_only) pointer = fall_back(bytes, stream);
  }
  if (pointer == nullptr && !planned_only) out_of_memory(bytes, stream);
  return pointer;
}

// What is true of every request that got memory.
void Device::admit(Owner& owner, std::int64_t bytes, std::int32_t stream) {
  owner.requested = bytes;
  owner.serial = serial_;
  owner.stream = stream;
  allocated_.add(owner.size());
  requested_.add(bytes);
  if (!recorder_.on()) return;
  owner.storage = recorder_.next_storage();
  recorder_.add(MEMPLAN_EVENT_ALLOC, bytes, owner.storage, stream);
}

void* Device::serve(std::int64_t bytes, std::int32_t stream, bool planned_only) {
  Range& range = *current_;
  Place place = range.arena.place(bytes, stream);
  if (place.kind == Kind::kNone && !planned_only && grows_beyond_mark(bytes, stream)) {
    place = range.arena.squeeze_in(bytes, stream);
  }
  if (place.kind == Kind::kNone) {
    ++misses_;
    return nullptr;
  }
  const std::int64_t upper = place.offset + rounded(bytes);
  if (!order(range, place, upper, stream) || !map(range, place.offset, upper)) {
    ++misses_;
    release(range, place.offset, place.cell, stream);
    // What is left of the device's memory is better used by one allocator than by two.
    retire();
    give_back_pages(kAll);
    return nullptr;
  }
  std::int64_t& count = place.kind == Kind::kPlanned   ? hits_
                        : place.kind == Kind::kDynamic ? dynamic_
                                                       : adopted_;
  ++count;
  ++range.live;
  Owner& owner = new_owner(range, place);
  admit(owner, bytes, stream);
  return pointer_to(owner.address);
}

Owner& Device::new_owner(Range& range, const Place& place) {
  const std::uint64_t address = range.base + static_cast<std::uint64_t>(place.offset);
  if (place.cell >= 0) {
    Owner& owner = range.holders[static_cast<std::size_t>(place.cell)];
    owner.address = address;
    return owner;
  }
  Owner& owner = owners_.insert(address);
  owner.range = &range;
  return owner;
}

Owner* Device::find(std::uint64_t address) {
  if (current_ != nullptr) {
    if (Owner* owner = current_->holder(address)) return owner;
  }
  for (const std::unique_ptr<Range>& range : retired_) {
    if (Owner* owner = range->holder(address)) return owner;
  }
  return owners_.find(address);
}

void* Device::fall_back(std::int64_t bytes, std::int32_t stream) {
  Upstream& upstream = hardware_->upstream;
  if (current_ != nullptr) make_room(upstream.growth(bytes, stream));
  caching::Block* block = upstream.malloc(bytes, stream);
  if (block == nullptr && give_back_pages(kAll) > 0) {
    ++retries_;
    block = upstream.malloc(bytes, stream);
  }
  if (block == nullptr) return nullptr;
  const auto address = static_cast<std::uint64_t>(block->address);
  Owner& owner = owners_.insert(address);
  owner.block = block;
  owner.missed = current_ != nullptr;
  if (owner.missed) fallback_.add(block->size);
  admit(owner, bytes, stream);
  return pointer_to(address);
}

void Device::out_of_memory(std::int64_t bytes, std::int32_t stream) {
  ++ooms_;
  if (recorder_.on()) recorder_.add(MEMPLAN_EVENT_OUT_OF_MEMORY, bytes, -1, stream);
}

bool Device::free_otherwise(std::uint64_t address) {
  Owner* owner = find(address);
  if (owner == nullptr) return false;
  ++frees_;
  if (recorder_.on()) {
    recorder_.add(MEMPLAN_EVENT_FREE, owner->requested, owner->storage, owner->stream);
  }
  allocated_.remove(owner->size());
  requested_.remove(owner->requested);
  if (owner->block == nullptr) {
    take_back(*owner);
    return true;
  }
  if (owner->missed) fallback_.remove(owner->size());
  hardware_->upstream.free(owner->block);
  owners_.erase(owner);
  return true;
}

// A place of an arena is free again, and nobody its owner.
void Device::take_back(Owner& owner) {
  Range& range = *owner.range;
  if (owner.shared) leave_uses(range, owner);
  release(range, static_cast<std::int64_t>(owner.address - range.base), owner.cell, owner.stream);
  if (owner.cell >= 0) {
    owner.address = 0;
    owner.shared = false;
  } else {
    owners_.erase(&owner);
  }
  if (--range.live == 0 && &range != current_.get()) drop_retired();
}

void Device::leave_uses(Range& range, const Owner& owner) {
  const auto offset = static_cast<std::int64_t>(owner.address - range.base);
  Range::Use use{offset, offset + owner.size(), {}};
  for (const std::int32_t stream : shared_[owner.address]) {
    use.marks.push_back(hardware_->marks.make(stream));
  }
  shared_.erase(owner.address);
  range.uses.push_back(std::move(use));
}

void Device::release(Range& range, std::int64_t offset, std::int32_t cell, std::int32_t stream) {
  if (range.arena.release(offset, cell)) pass_on(range, offset, stream);
}

// What was released there may pass to another stream.
void Device::pass_on(Range& range, std::int64_t offset, std::int32_t stream) {
  range.arena.released_in(offset, hardware_->marks.make(stream));
}

bool Device::record_stream(void* pointer, Stream handle) {
  const std::lock_guard guard(lock_);
  Owner* owner = find(address_of(pointer));
  const bool noted = owner == nullptr;
  if (noted) owner = noted_.find(address_of(pointer));
  if (owner == nullptr) return false;
  const std::int32_t stream = hardware_->streams.number(handle);
  if (recorder_.on()) {
    recorder_.add(MEMPLAN_EVENT_RECORD_STREAM, owner->requested, owner->storage, stream);
  }
  if (noted || stream == owner->stream) return true;
  owner->shared = owner->shared || owner->block == nullptr;
  std::vector<std::int32_t>& uses =
      owner->block != nullptr ? owner->block->stream_uses : shared_[owner->address];
  if (std::find(uses.begin(), uses.end(), stream) == uses.end()) uses.push_back(stream);
  return true;
}

bool Device::owns(const void* pointer) {
  const std::lock_guard guard(lock_);
  const std::uint64_t address = address_of(pointer);
  return (current_ != nullptr && current_->holds(address)) ||
         std::any_of(retired_.begin(), retired_.end(),
                     [address](const auto& range) { return range->holds(address); });
}

void Device::empty_cache() {
  const std::lock_guard guard(lock_);
  if (hardware_ == nullptr) return;
  if (recorder_.on()) recorder_.add(MEMPLAN_EVENT_EMPTY_CACHE, 0, -1, 0);
  hardware_->upstream.release_cached();
  give_back_pages(kAll);
  drop_retired();
}

// ---- The arena ---------------------------------------------------------------------------------

void Device::forget_passed(Range& range) {
  const Marks& marks = hardware_->marks;
  std::erase_if(range.uses, [&marks](const Range::Use& use) {
    return std::all_of(use.marks.begin(), use.marks.end(),
                       [&marks](std::int32_t mark) { return marks.passed(mark); });
  });
}

// Lets the stream come after all that used these bytes on others. False when that cannot be had:
// then the next one that gets them has to.
bool Device::order(Range& range, const Place& place, std::int64_t upper, std::int32_t stream) {
  const std::vector<std::int32_t>& after = range.arena.after();
  if (after.empty() && range.uses.empty()) return true;
  Range::Use left{place.offset, upper, {}};
  const auto wait = [this, stream, &left](const std::vector<std::int32_t>& marks) {
    for (std::int32_t mark : marks) {
      // All that the stream has been given until now.
      if (mark < 0) mark = hardware_->marks.make(-1 - mark);
      if (!hardware_->marks.wait(stream, mark)) left.marks.push_back(mark);
    }
  };
  wait(after);
  if (!range.uses.empty()) {
    hardware_->marks.poll();
    forget_passed(range);
    for (const Range::Use& use : range.uses) {
      if (use.lower < upper && place.offset < use.upper) wait(use.marks);
    }
  }
  if (left.marks.empty()) return true;
  range.uses.push_back(std::move(left));
  return false;
}

bool Device::map(Range& range, std::int64_t lower, std::int64_t upper) {
  if (range.pages == nullptr && !range.make_pages(*hardware_)) return false;
  if (range.pages->ready(lower, upper)) return true;
  make_room(range.pages->missing(lower, upper));
  if (range.pages->ensure(lower, upper)) return true;
  ++retries_;
  hardware_->upstream.release_cached();
  if (range.pages->ensure(lower, upper)) return true;
  return give_back_pages(kAll) > 0 && range.pages->ensure(lower, upper);
}

bool Device::grows_beyond_mark(std::int64_t bytes, std::int32_t stream) {
  const std::int64_t growth = hardware_->upstream.growth(bytes, stream);
  return growth > 0 && mark_.exceeded_by(hardware_->counted.own() + growth) > 0;
}

// So many bytes are about to be taken from the device: beyond the mark only when nothing unused is
// left to give back.
void Device::make_room(std::int64_t bytes) {
  const auto above = [this, bytes] { return mark_.exceeded_by(hardware_->counted.own() + bytes); };
  if (bytes == 0 || above() <= 0) return;
  const Plan& plan = *current_->plan;
  if (mark_.stays(plan, serial_)) {
    const std::int64_t before = hardware_->counted.own();
    // Not too little: each time the device is waited for.
    give_back_pages(std::max(above(), plan.arena_bytes() / kAtOnce));
    if (above() > 0 && hardware_->upstream.cached() > 0) hardware_->upstream.release_cached();
    mark_.given(before - hardware_->counted.own());
  }
  mark_.rise(above());
}

std::int64_t Device::give_back_pages(std::int64_t enough) {
  std::vector<Range*> ranges;
  for (const std::unique_ptr<Range>& range : retired_) ranges.push_back(range.get());
  if (current_ != nullptr) ranges.push_back(current_.get());
  std::erase_if(ranges, [](const Range* range) {
    return range->pages == nullptr || !range->pages->any_unused(range->in_use());
  });
  // Work that is under way may use what the host has released.
  if (ranges.empty() || !hardware_->marks.synchronize()) return 0;
  std::int64_t bytes = 0;
  for (Range* range : ranges) {
    range->uses.clear();
    if (bytes < enough) bytes += range->give_back(enough - bytes);
  }
  return bytes;
}

// The plan's arena takes no more requests.
void Device::retire() {
  if (current_ == nullptr) return;
  resyncs_ += current_->arena.counters().resyncs;
  retired_.push_back(std::move(current_));
  drop_retired();
}

// Gives up the addresses of arenas that nothing lives in.
void Device::drop_retired() {
  const auto empty = [](const std::unique_ptr<Range>& range) { return range->live == 0; };
  if (std::none_of(retired_.begin(), retired_.end(), empty)) return;
  const auto untouched = [](const std::unique_ptr<Range>& range) {
    return range->live == 0 && range->pages == nullptr;
  };
  std::erase_if(retired_, untouched);
  if (std::none_of(retired_.begin(), retired_.end(), empty)) return;
  if (hardware_->marks.synchronize()) std::erase_if(retired_, empty);
}

std::string Device::load(std::shared_ptr<const Plan> plan, bool in_round) {
  const std::lock_guard guard(lock_);
  auto range = std::make_unique<Range>(std::move(plan), in_round);
  if (hardware_ != nullptr && hardware_->page == 0) {
    return "this device cannot map memory in pages, which an arena needs";
  }
  if (hardware_ != nullptr && !range->make_pages(*hardware_)) return "no addresses are left for an arena";
  retire();
  current_ = std::move(range);
  if (hardware_ != nullptr) {
    hardware_->upstream.release_cached();
    give_back_pages(kAll);
  }
  const bool known = hardware_ != nullptr;
  mark_.set(*current_->plan, in_round, known ? hardware_->page : kLeastPage,
            known ? hardware_->counted.own() : 0);
  return "";
}

void Device::unload() {
  const std::lock_guard guard(lock_);
  retire();
  if (hardware_ != nullptr) give_back_pages(kAll);
}

void Device::enter_phase(std::int32_t phase) {
  const std::lock_guard guard(lock_);
  if (current_ != nullptr) current_->arena.enter_phase(phase);
}

}  // namespace memplan::planned

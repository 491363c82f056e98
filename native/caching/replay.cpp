#include "caching/replay.hpp"

#include <algorithm>
#include <deque>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>

#include "caching/address_space.hpp"
#include "caching/stream_clocks.hpp"

namespace memplan::caching {

namespace {

[[noreturn]] void reject(std::size_t event, const char* what) {
  throw std::invalid_argument("event " + std::to_string(event) + ": " + what);
}

std::vector<ObservedSegment> observed_segments(const ReplayInput& input) {
  const EventColumns& events = input.events;
  std::vector<ObservedSegment> observed;
  for (std::size_t i = 0; i < events.kind.size(); ++i) {
    const auto kind = static_cast<EventKind>(events.kind[i]);
    const bool mapped = kind == EventKind::kSegmentMap;
    if ((kind != EventKind::kSegmentAlloc && !mapped) || events.device[i] != input.device) continue;
    if (events.aux[i] < 0) continue;
    observed.push_back({static_cast<std::int64_t>(i), events.bytes[i], events.aux[i],
                        events.stream[i], mapped});
  }
  return observed;
}

// Feeds events to the allocator and decides when a freed block may be reused.
class Replay {
 public:
  Replay(const Settings& settings, const ReplayInput& input)
      : input_(input),
        addresses_(observed_segments(input)),
        allocator_(settings, addresses_, [this] { return complete_all(); }, true),
        blocks_(static_cast<std::size_t>(input.storages), nullptr),
        completion_seen_(static_cast<std::size_t>(input.storages), 0) {
    for (std::size_t i = 0; i < input.events.kind.size(); ++i) {
      if (static_cast<EventKind>(input.events.kind[i]) != EventKind::kFreeCompleted) continue;
      if (const std::int64_t storage = input.events.storage[i]; storage >= 0) {
        completion_seen_[static_cast<std::size_t>(storage)] = 1;
      }
    }
    const std::vector<Block*> restored = allocator_.restore(input.segments, input.blocks);
    for (const InitialStorage& resident : input.residents) {
      blocks_[static_cast<std::size_t>(resident.storage)] =
          restored[static_cast<std::size_t>(resident.block)];
    }
  }

  ReplaySummary run(ReplayColumns out) {
    summary_.start = allocator_.statistics();
    const EventColumns& events = input_.events;
    for (std::size_t i = 0; i < events.kind.size(); ++i) {
      out.address[i] = events.device[i] == input_.device ? step(i) : -1;
      const Statistics& now = allocator_.statistics();
      out.requested[i] = now.requested;
      out.allocated[i] = now.allocated;
      out.active[i] = now.active;
      out.reserved[i] = now.reserved;
    }
    summary_.end = allocator_.statistics();
    summary_.segment_events = allocator_.segment_events();
    return std::move(summary_);
  }

 private:
  // Returns the block's address for an allocation, else -1.
  std::int64_t step(std::size_t i) {
    const EventColumns& events = input_.events;
    const std::int64_t storage = events.storage[i];
    const std::int32_t stream = events.stream[i];
    allocator_.set_now(static_cast<std::int64_t>(i));
    switch (static_cast<EventKind>(events.kind[i])) {
      case EventKind::kAlloc:
        return alloc(i, storage, events.bytes[i], stream);
      case EventKind::kFree:
        free(storage);
        break;
      case EventKind::kFreeCompleted:
        free_completed(storage);
        break;
      case EventKind::kRecordStream:
        record_stream(storage, stream);
        break;
      case EventKind::kEventRecord:
        if (!input_.reuse_early) clocks_.record(stream, events.aux[i]);
        break;
      case EventKind::kEventWait:
        if (!input_.reuse_early) clocks_.wait(stream, events.aux[i]);
        break;
      case EventKind::kSynchronize:
        synchronize(stream);
        break;
      case EventKind::kEmptyCache:
        allocator_.release_cached();
        break;
      default:  // What a log shows of the allocator's own doings decides nothing.
        break;
    }
    return -1;
  }

  std::int64_t alloc(std::size_t i, std::int64_t storage, std::int64_t bytes, std::int32_t stream) {
    if (storage < 0) reject(i, "an allocation without a storage");
    if (bytes < 0 || bytes > kMaxRequest) reject(i, "an allocation of an impossible size");
    Block*& slot = blocks_[static_cast<std::size_t>(storage)];
    if (slot != nullptr) reject(i, "a storage generation that begins twice");
    if (bytes == 0) {  // PyTorch hands out a null pointer and asks the allocator for nothing.
      slot = &empty_;
      return -1;
    }
    Block* block = allocator_.malloc(bytes, stream);
    const std::int64_t least = input_.events.least[i];
    if (block == nullptr && least < bytes) {  // A kernel takes its next plan.
      if (least <= 0) {
        slot = &empty_;
        return -1;
      }
      block = allocator_.malloc(least, stream);
    }
    if (block == nullptr) {
      summary_.oom_event = static_cast<std::int64_t>(i);
      summary_.oom_bytes = bytes;
      allocator_.lift_limits();
      block = allocator_.malloc(bytes, stream);
    }
    slot = block;
    return block->address;
  }

  // The block of a storage that the host still holds; nullptr otherwise.
  Block* held(std::int64_t storage) const {
    if (storage < 0) return nullptr;
    Block* block = blocks_[static_cast<std::size_t>(storage)];
    return block != nullptr && block->allocated ? block : nullptr;
  }

  void free(std::int64_t storage) {
    if (storage >= 0 && blocks_[static_cast<std::size_t>(storage)] == &empty_) return;
    Block* block = held(storage);
    if (block == nullptr) {
      ++summary_.unknown_frees;
      return;
    }
    allocator_.begin_free(block);
    if (completion_seen_[static_cast<std::size_t>(storage)] != 0) {
      block->stream_uses.clear();
      block->waiting_slot = static_cast<int>(waiting_.size());
      waiting_.push_back({block, storage});
      return;
    }
    blocks_[static_cast<std::size_t>(storage)] = &gone_;
    if (block->stream_uses.empty() || input_.reuse_early) {
      block->stream_uses.clear();
      allocator_.complete_free(block);
      return;
    }
    for (const std::int32_t stream : block->stream_uses) {
      pending_[stream].push_back({clocks_.mark(stream), block});
      ++block->pending;
    }
    block->stream_uses.clear();
  }

  void free_completed(std::int64_t storage) {
    if (storage < 0) return;
    if (held(storage) != nullptr) free(storage);  // The log began between the two.
    Block* block = blocks_[static_cast<std::size_t>(storage)];
    if (block == nullptr || block->waiting_slot < 0) return;
    complete_waiting(static_cast<std::size_t>(block->waiting_slot));
  }

  void complete_waiting(std::size_t slot) {
    const auto [block, storage] = waiting_[slot];
    waiting_[slot] = waiting_.back();
    waiting_[slot].block->waiting_slot = static_cast<int>(slot);
    waiting_.pop_back();
    block->waiting_slot = -1;
    blocks_[static_cast<std::size_t>(storage)] = &gone_;
    allocator_.complete_free(block);
  }

  void record_stream(std::int64_t storage, std::int32_t stream) {
    Block* block = held(storage);
    if (block == nullptr || block->stream == stream) return;
    std::vector<std::int32_t>& uses = block->stream_uses;
    if (std::find(uses.begin(), uses.end(), stream) == uses.end()) uses.push_back(stream);
  }

  void synchronize(std::int32_t stream) {
    if (input_.reuse_early) return;
    if (stream < 0) {
      clocks_.synchronize_all();
    } else {
      clocks_.synchronize(stream);
    }
    complete_passed();
  }

  void complete_passed() {
    for (auto& [stream, queue] : pending_) {
      const std::int64_t passed = clocks_.passed(stream);
      while (!queue.empty() && queue.front().mark <= passed) {
        Block* block = queue.front().block;
        queue.pop_front();
        if (--block->pending == 0) allocator_.complete_free(block);
      }
    }
  }

  bool complete_all() {
    clocks_.synchronize_all();
    complete_passed();
    while (!waiting_.empty()) complete_waiting(waiting_.size() - 1);
    return true;
  }

  struct PendingUse {
    std::int64_t mark;
    Block* block;
  };
  struct Waiting {
    Block* block;
    std::int64_t storage;
  };

  const ReplayInput& input_;
  AddressSpace addresses_;
  Allocator allocator_;
  StreamClocks clocks_;
  std::vector<Block*> blocks_;            // By storage; &gone_ once its life is over.
  std::vector<std::uint8_t> completion_seen_;  // By storage: a FREE_COMPLETED exists.
  std::map<std::int32_t, std::deque<PendingUse>> pending_;  // By the stream that uses.
  std::vector<Waiting> waiting_;  // Freed; the log says later when they may be reused.
  Block empty_;                   // Stands for a storage of zero bytes.
  Block gone_;
  ReplaySummary summary_;
};

}  // namespace

ReplaySummary replay(const Settings& settings, const ReplayInput& input, ReplayColumns out) {
  return Replay(settings, input).run(out);
}

}  // namespace memplan::caching

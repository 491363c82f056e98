// PyTorch's own allocator with planned places before it: requests that the plan foresees are served
// by libmemplan_planned.so, all others by the allocator that was there. So out of memory is
// PyTorch's own error, and statistics, snapshots, graphs, pools and record_stream go on working.
// Built against the installed PyTorch by `python -m memplan.runtime.planned.adaptor`.

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <vector>

#include "c_api.h"
#include "delegating.hpp"

namespace memplan::adaptor {
namespace {

constexpr size_t kDevices = 64;

// The functions of the library, found by name: it is loaded already, from a path of its own.
struct Planned {
  decltype(&memplan_malloc_planned) malloc = nullptr;
  decltype(&memplan_free) free = nullptr;
  decltype(&memplan_owns) owns = nullptr;
  decltype(&memplan_record_stream) record_stream = nullptr;
  decltype(&memplan_empty_cache) empty_cache = nullptr;
  decltype(&memplan_unload) unload = nullptr;
  decltype(&memplan_count) count = nullptr;
  decltype(&memplan_note_malloc) note_malloc = nullptr;
  decltype(&memplan_note_free) note_free = nullptr;
  decltype(&memplan_read_statistics) read_statistics = nullptr;
  decltype(&memplan_reset_peaks) reset_peaks = nullptr;
  decltype(&memplan_snapshot) snapshot = nullptr;
};

Planned planned;

template <typename Function>
bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

bool find_all(const char* path) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  return library != nullptr && find(library, "memplan_malloc_planned", planned.malloc) &&
         find(library, "memplan_free", planned.free) &&
         find(library, "memplan_owns", planned.owns) &&
         find(library, "memplan_record_stream", planned.record_stream) &&
         find(library, "memplan_empty_cache", planned.empty_cache) &&
         find(library, "memplan_unload", planned.unload) &&
         find(library, "memplan_count", planned.count) &&
         find(library, "memplan_note_malloc", planned.note_malloc) &&
         find(library, "memplan_note_free", planned.note_free) &&
         find(library, "memplan_read_statistics", planned.read_statistics) &&
         find(library, "memplan_reset_peaks", planned.reset_peaks) &&
         find(library, "memplan_snapshot", planned.snapshot);
}

void release(void* pointer);

DeviceIndex current_device() {
  DeviceIndex device = 0;
  C10_CUDA_CHECK(c10::cuda::GetDevice(&device));
  return device;
}

// Bytes of the native allocator that the library has been told of.
struct Told {
  std::atomic<int64_t> allocated{0};
  std::atomic<int64_t> requested{0};
  std::atomic<int64_t> reserved{0};
};

constexpr int64_t rounded(int64_t bytes) { return std::max<int64_t>(bytes + 511, 512) / 512 * 512; }

class Planning;
Planning* installed = nullptr;  // Never destroyed: tensors may outlive all else.

class Planning final : public Delegating {
 public:
  explicit Planning(native::CUDAAllocator* next) : Delegating(next) {}

  // What the native allocator holds already, and from now on what it does, goes to the library's
  // statistics: peaks are then of the sum.
  void init(int devices) override {
    next_->init(devices);
    follow_native(devices);
  }

  void follow_native(int devices) {
    for (int device = 0; device < devices; ++device) {
      const auto held = next_->getDeviceStats(static_cast<DeviceIndex>(device));
      tell(static_cast<DeviceIndex>(device), held.allocated_bytes[0].current,
           held.requested_bytes[0].current, held.reserved_bytes[0].current);
    }
    next_->attachAllocatorTraceTracker([this](const native::TraceEntry& entry) { follow(entry); });
  }

  c10::DataPtr allocate(size_t bytes) override {
    const DeviceIndex device = current_device();
    void* place = plan_for(bytes, device, c10::cuda::getCurrentCUDAStream(device));
    if (place != nullptr) return {place, place, &release, {c10::DeviceType::CUDA, device}};
    return retrying(device, [&] { return next_->allocate(bytes); });
  }

  void* raw_alloc(size_t bytes) override {
    const DeviceIndex device = current_device();
    void* place = plan_for(bytes, device, c10::cuda::getCurrentCUDAStream(device));
    return place != nullptr ? place : retrying(device, [&] { return next_->raw_alloc(bytes); });
  }

  void* raw_alloc_with_stream(size_t bytes, cudaStream_t stream) override {
    const DeviceIndex device = current_device();
    void* place = plan_for(bytes, device, stream);
    if (place != nullptr) return place;
    return retrying(device, [&] { return next_->raw_alloc_with_stream(bytes, stream); });
  }

  void raw_delete(void* pointer) override {
    if (pointer != nullptr && planned.owns(pointer) != 0) {
      release(pointer);
    } else {
      next_->raw_delete(pointer);
    }
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void native_delete(void* pointer) { next_->raw_delete(pointer); }

  bool is_simple_data_ptr(const c10::DataPtr& data) const override {
    return data.get() == data.get_context();
  }

  using CUDAAllocator::recordStream;
  void recordStream(const c10::DataPtr& data, c10::cuda::CUDAStream stream) override {
    // Of the native allocator's memory the library records the use alone.
    planned.record_stream(data.get(), stream.stream());
    if (planned.owns(data.get()) == 0) next_->recordStream(data, stream);
  }

  void emptyCache(MempoolId_t pool) override {
    next_->emptyCache(pool);
    for (size_t device = 0; device < kDevices; ++device) {
      if (seen_[device].load()) planned.empty_cache(static_cast<int>(device));
    }
  }

  // While a graph is captured or a pool is in use the plan is not asked: such memory stays with the
  // pool, and replays of the graph use it without asking.
  void beginAllocateToPool(DeviceIndex device, MempoolId_t pool,
                           std::function<bool(cudaStream_t)> filter) override {
    next_->beginAllocateToPool(device, pool, std::move(filter));
    pools_.fetch_add(1);
  }
  void endAllocateToPool(DeviceIndex device, MempoolId_t pool) override {
    pools_.fetch_sub(1);
    next_->endAllocateToPool(device, pool);
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override;
  void resetPeakStats(DeviceIndex device) override {
    next_->resetPeakStats(device);
    planned.reset_peaks(device);
  }
  native::SnapshotInfo snapshot(MempoolId_t pool, bool traces) override;

  void* getBaseAllocation(void* pointer, size_t* bytes) override {
    refuse_sharing(pointer);
    return next_->getBaseAllocation(pointer, bytes);
  }
  native::ShareableHandle shareIpcHandle(void* pointer) override {
    refuse_sharing(pointer);
    return next_->shareIpcHandle(pointer);
  }

  // Pages are mapped for their own device alone; a peer copy does not need more.
  cudaError_t memcpyAsync(void* to, int to_device, const void* from, int from_device, size_t count,
                          cudaStream_t stream, bool peer_access) override {
    if (peer_access && (planned.owns(to) != 0 || planned.owns(from) != 0)) {
      return cudaMemcpyPeerAsync(to, to_device, from, from_device, count, stream);
    }
    return next_->memcpyAsync(to, to_device, from, from_device, count, stream, peer_access);
  }

 private:
  void append_arena(DeviceIndex device, native::SnapshotInfo& found);

  void* plan_for(size_t bytes, DeviceIndex device, cudaStream_t stream) {
    if (bytes == 0 || pools_.load(std::memory_order_relaxed) != 0) return nullptr;
    void* place = planned.malloc(static_cast<ssize_t>(bytes), device, stream);
    if (place == nullptr) return nullptr;
    return place;
  }

  // Out of memory under a plan: its pages are given up, and PyTorch tries again.
  template <typename Request>
  auto retrying(DeviceIndex device, Request request) -> decltype(request()) {
    try {
      return request();
    } catch (const c10::OutOfMemoryError&) {
      memplan_statistics before{};
      if (planned.read_statistics(device, &before) != 0 || before.arena_mapped == 0) throw;
      planned.unload(device);
    }
    return request();
  }

  // Called by the native allocator, under its lock, for what it does.
  void follow(const native::TraceEntry& entry) {
    const auto bytes = static_cast<int64_t>(entry.size_);
    const auto* pointer = reinterpret_cast<const void*>(entry.addr_);
    switch (entry.action_) {
      case native::TraceEntry::ALLOC:
        planned.note_malloc(entry.device_, pointer, bytes, entry.stream_);
        return tell(entry.device_, rounded(bytes), bytes, 0);
      case native::TraceEntry::FREE_REQUESTED:
        planned.note_free(entry.device_, pointer);
        return tell(entry.device_, -rounded(bytes), -bytes, 0);
      case native::TraceEntry::SEGMENT_ALLOC:
      case native::TraceEntry::SEGMENT_MAP:
        return tell(entry.device_, 0, 0, bytes);
      case native::TraceEntry::SEGMENT_FREE:
      case native::TraceEntry::SEGMENT_UNMAP:
        return tell(entry.device_, 0, 0, -bytes);
      default:
        return;
    }
  }

  // Not for a device that the job does not use: it would get a context.
  void tell(DeviceIndex device, int64_t allocated, int64_t requested, int64_t reserved) {
    if (allocated == 0 && requested == 0 && reserved == 0) return;
    seen_.at(static_cast<size_t>(device)).store(true, std::memory_order_relaxed);
    Told& told = told_.at(static_cast<size_t>(device));
    told.allocated.fetch_add(allocated);
    told.requested.fetch_add(requested);
    told.reserved.fetch_add(reserved);
    planned.count(device, allocated, requested, reserved);
  }

  void refuse_sharing(const void* pointer) const {
    TORCH_CHECK(planned.owns(pointer) == 0,
                "this tensor lies at a planned place and cannot be shared with another process; "
                "clone it after memplan's plan has been taken out of effect");
  }

  std::atomic<int> pools_{0};
  std::array<std::atomic<bool>, kDevices> seen_{};
  std::array<Told, kDevices> told_{};
};

// The library's deleter has no context: PyTorch's raw functions pass the address alone.
void release(void* pointer) {
  if (pointer == nullptr) return;
  if (planned.owns(pointer) != 0) {
    planned.free(pointer, 0, 0, nullptr);
  } else {
    installed->native_delete(pointer);
  }
}

// Sums of the two; peaks are those of the sum. What the native allocator counts by pool, and its
// totals since the beginning, stay its own.
c10::CachingDeviceAllocator::DeviceStats Planning::getDeviceStats(DeviceIndex device) {
  auto stats = next_->getDeviceStats(device);
  memplan_statistics both{};
  if (planned.read_statistics(device, &both) != 0) return stats;
  const Told& told = told_.at(static_cast<size_t>(device));
  const auto join = [](c10::CachingAllocator::Stat& stat, int64_t sum, int64_t peak, int64_t told) {
    stat.current += sum - told;
    stat.peak = std::max({stat.peak, stat.current, peak});
  };
  join(stats.allocated_bytes[0], both.allocated, both.allocated_peak, told.allocated);
  join(stats.active_bytes[0], both.allocated, both.allocated_peak, told.allocated);
  join(stats.requested_bytes[0], both.requested, both.requested_peak, told.requested);
  join(stats.reserved_bytes[0], both.reserved, both.reserved_peak, told.reserved);
  const int64_t blocks = both.mallocs - both.misses - both.frees;
  for (auto* count : {&stats.allocation[0], &stats.active[0]}) {
    count->current += blocks;
    count->peak = std::max(count->peak, count->current);
  }
  return stats;
}

// The arena is one more expandable segment of each device.
native::SnapshotInfo Planning::snapshot(MempoolId_t pool, bool traces) {
  auto found = next_->snapshot(pool, traces);
  if (pool != MempoolId_t{0, 0}) return found;
  for (size_t device = 0; device < kDevices; ++device) {
    if (seen_[device].load()) append_arena(static_cast<DeviceIndex>(device), found);
  }
  return found;
}

void Planning::append_arena(DeviceIndex device, native::SnapshotInfo& found) {
  std::vector<memplan_block> blocks;
  int64_t count = planned.snapshot(device, nullptr, 0);
  do {
    blocks.resize(static_cast<size_t>(count));
    count = planned.snapshot(device, blocks.data(), static_cast<int64_t>(blocks.size()));
  } while (count > static_cast<int64_t>(blocks.size()));
  blocks.resize(static_cast<size_t>(count));
  int64_t segment = -1;
  for (const memplan_block& block : blocks) {
    if (block.segment != segment) {
      segment = block.segment;
      auto& info = found.segments.emplace_back();
      info.device = device;
      info.address = static_cast<size_t>(block.address);
      info.stream = block.stream;
      info.is_large = info.is_expandable = true;
    }
    auto& info = found.segments.back();
    const auto bytes = static_cast<size_t>(block.bytes);
    const auto requested = static_cast<size_t>(block.requested);
    info.total_size += bytes;
    info.requested_size += requested;
    info.allocated_size += block.state == 1 ? bytes : 0;
    info.active_size += block.state != 0 ? bytes : 0;
    auto& one = info.blocks.emplace_back();
    one.size = bytes;
    one.requested_size = requested;
    one.allocated = block.state == 1;
    one.active = block.state != 0;
  }
}

}  // namespace

// 0; 1 where it was installed before; -1 where `path` is not the library.
int install(const char* path) {
  if (installed != nullptr) return 1;
  if (!find_all(path)) return -1;
  native::CUDAAllocator* next = native::get();
  const c10::DeviceIndex devices = c10::cuda::device_count();
  installed = new Planning(next);
  if (next->initialized()) installed->follow_native(devices);
  native::allocator.store(installed);
  c10::SetAllocator(c10::DeviceType::CUDA, installed);
  return 0;
}

}  // namespace memplan::adaptor

extern "C" __attribute__((visibility("default"))) int memplan_adaptor_install(const char* path) {
  return memplan::adaptor::install(path);
}

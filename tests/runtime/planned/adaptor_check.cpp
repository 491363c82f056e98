// The adaptor before an allocator that stands in for PyTorch's, over the stand-in CUDA driver: no
// GPU, no CUDA build of PyTorch; its headers and CUDA's, and c10, are enough. What libc10_cuda and
// libcudart would define is below. `check LIBRARY DRIVER` ends with 0, or names the line that fails.

#include <c10/cuda/CUDAFunctions.h>
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <map>

#include "c_api.h"
#include "delegating.hpp"

#define CHECK(condition)                                                      \
  do {                                                                        \
    if (!(condition)) {                                                       \
      std::fprintf(stderr, "line %d: not true: %s\n", __LINE__, #condition);  \
      std::exit(1);                                                           \
    }                                                                         \
  } while (false)

extern "C" int memplan_adaptor_install(const char* path);

namespace {
cudaStream_t current_stream = nullptr;
int peer_copies = 0;
constexpr std::int64_t kMiB = 1 << 20;
}  // namespace

namespace c10::cuda {
DeviceIndex device_count() noexcept { return 1; }
cudaError_t GetDevice(DeviceIndex* device) {
  *device = 0;
  return cudaSuccess;
}
CUDAStream getCurrentCUDAStream(DeviceIndex device) {
  return CUDAStream(Stream(Stream::UNSAFE, Device(DeviceType::CUDA, device), 0));
}
cudaStream_t CUDAStream::stream() const { return current_stream; }
void c10_cuda_check_implementation(const int32_t, const char*, const char*, const uint32_t, const bool) {}
namespace CUDACachingAllocator {
std::atomic<CUDAAllocator*> allocator{nullptr};
}
}  // namespace c10::cuda

extern "C" cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = *total = 0;
  return cudaSuccess;
}
extern "C" cudaError_t cudaMemcpyPeerAsync(void*, int, const void*, int, size_t, cudaStream_t) {
  ++peer_copies;
  return cudaSuccess;
}

namespace {

namespace native = c10::cuda::CUDACachingAllocator;
using native::TraceEntry;

// Every block is a segment of its own, given back at once.
class StandIn final : public memplan::adaptor::Delegating {
 public:
  StandIn() : Delegating(nullptr) {}

  void* raw_alloc(size_t bytes) override {
    if (failures > 0) {
      --failures;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory");
    }
    void* pointer = std::malloc(bytes);
    blocks[pointer] = bytes;
    tell(TraceEntry::SEGMENT_ALLOC, bytes, pointer);
    tell(TraceEntry::ALLOC, bytes, pointer);
    return pointer;
  }
  void* raw_alloc_with_stream(size_t bytes, cudaStream_t) override { return raw_alloc(bytes); }
  void raw_delete(void* pointer) override {
    if (pointer == nullptr) return;
    tell(TraceEntry::FREE_REQUESTED, blocks.at(pointer), pointer);
    tell(TraceEntry::SEGMENT_FREE, blocks.at(pointer), pointer);
    blocks.erase(pointer);
    std::free(pointer);
  }
  c10::DataPtr allocate(size_t bytes) override {
    void* pointer = raw_alloc(bytes);
    return {pointer, pointer, raw_deleter(), {c10::DeviceType::CUDA, 0}};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }

  bool initialized() override { return ready; }
  void init(int) override { ready = true; }
  std::string name() override { return "native"; }
  void attachAllocatorTraceTracker(native::AllocatorTraceTracker one) override { tracker = one; }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return stats; }
  void resetPeakStats(c10::DeviceIndex) override {
    for (auto* stat : {&stats.allocated_bytes[0], &stats.reserved_bytes[0]}) stat->reset_peak();
  }
  using CUDAAllocator::recordStream;
  void recordStream(const c10::DataPtr&, c10::cuda::CUDAStream) override { ++recorded; }
  void emptyCache(c10::MempoolId_t) override { ++emptied; }
  native::SnapshotInfo snapshot(c10::MempoolId_t, bool) override { return {}; }
  void beginAllocateToPool(c10::DeviceIndex, c10::MempoolId_t,
                           std::function<bool(cudaStream_t)>) override {}
  void endAllocateToPool(c10::DeviceIndex, c10::MempoolId_t) override {}
  native::ShareableHandle shareIpcHandle(void*) override { return {0, "handle"}; }
  cudaError_t memcpyAsync(void*, int, const void*, int, size_t, cudaStream_t, bool) override {
    return cudaSuccess;
  }

  std::map<void*, size_t> blocks;
  int failures = 0, recorded = 0, emptied = 0;
  bool ready = false;

 private:
  static void give_back(void* pointer);

  void tell(TraceEntry::Action action, size_t bytes, void* pointer) {
    const auto amount = static_cast<std::int64_t>(bytes);
    const auto address = reinterpret_cast<size_t>(pointer);
    switch (action) {
      case TraceEntry::ALLOC: stats.allocated_bytes[0].increase(bytes); break;
      case TraceEntry::FREE_REQUESTED: stats.allocated_bytes[0].decrease(bytes); break;
      case TraceEntry::SEGMENT_ALLOC: stats.reserved_bytes[0].increase(bytes); break;
      default: stats.reserved_bytes[0].decrease(bytes);
    }
    if (tracker && amount > 0) tracker(TraceEntry(action, 0, address, bytes, nullptr, {0, 0}, 0));
  }

  c10::CachingDeviceAllocator::DeviceStats stats;
  native::AllocatorTraceTracker tracker;
};

StandIn& stand_in() {
  static StandIn one;
  return one;
}
void StandIn::give_back(void* pointer) { stand_in().raw_delete(pointer); }

// 4 MiB at 0 and, inside of its life, 8 MiB behind it; again in every round.
void load_plan() {
  const std::int64_t bytes[] = {4 * kMiB, 8 * kMiB}, zero[] = {0, 0}, none[] = {-1, -1};
  const std::int64_t lower[] = {0, 1}, upper[] = {3, 2}, offset[] = {0, 4 * kMiB};
  memplan_plan plan{};
  plan.abi = MEMPLAN_ABI;
  plan.requests = 2;
  plan.clock = 4;
  plan.arena_bytes = 12 * kMiB;
  plan.phases = 1;
  plan.bytes = bytes;
  plan.stream = plan.phase = zero;
  plan.lower = lower;
  plan.upper = upper;
  plan.offset = offset;
  plan.space = none;
  plan.space_ranges = zero;
  char why[256] = "";
  const int refused = memplan_load(0, &plan, 1, why, sizeof why);
  if (refused) std::fprintf(stderr, "%s\n", why);
  CHECK(refused == 0);
}

std::int64_t allocated() { return native::get()->getDeviceStats(0).allocated_bytes[0].current; }

void places_and_sums() {
  auto* one = native::get();
  const c10::DataPtr before = one->allocate(2 * kMiB);
  CHECK(stand_in().blocks.size() == 1 && !memplan_owns(before.get()));
  load_plan();
  for (int round = 0; round < 2; ++round) {
    const c10::DataPtr first = one->allocate(4 * kMiB);
    const c10::DataPtr second = one->allocate(8 * kMiB);
    CHECK(memplan_owns(first.get()) && memplan_owns(static_cast<char*>(first.get()) + 99));
    CHECK(static_cast<char*>(second.get()) - static_cast<char*>(first.get()) == 4 * kMiB);
    CHECK(allocated() == 14 * kMiB);
    CHECK(one->getDeviceStats(0).reserved_bytes[0].current == 14 * kMiB);
    CHECK(first.get_deleter() == one->raw_deleter() && one->is_simple_data_ptr(first));
    one->recordStream(first, c10::cuda::getCurrentCUDAStream(0));
    CHECK(stand_in().recorded == 0);
    const auto found = one->snapshot({0, 0}, false);
    CHECK(found.segments.size() == 1 && found.segments[0].allocated_size == 12 * kMiB);
  }
  CHECK(allocated() == 2 * kMiB);
  CHECK(one->getDeviceStats(0).allocated_bytes[0].peak == 14 * kMiB);
  one->resetPeakStats(0);
  CHECK(one->getDeviceStats(0).allocated_bytes[0].peak == 2 * kMiB);
  one->recordStream(before, c10::cuda::getCurrentCUDAStream(0));
  CHECK(stand_in().recorded == 1);
}

void raw_pointers_and_refusals() {
  auto* one = native::get();
  void* planned = one->raw_alloc(4 * kMiB);
  void* other = one->raw_alloc_with_stream(300 * kMiB, nullptr);
  CHECK(memplan_owns(planned) && !memplan_owns(other) && stand_in().blocks.count(other) == 1);
  CHECK(one->shareIpcHandle(other).handle == "handle");
  bool refused = false;
  try {
    one->shareIpcHandle(planned);
  } catch (const c10::Error& error) {
    refused = std::string(error.what()).find("planned place") != std::string::npos;
  }
  CHECK(refused);
  one->memcpyAsync(other, 0, planned, 0, 1, nullptr, true);
  CHECK(peer_copies == 1);
  one->raw_deallocate(other);
  one->raw_delete(planned);
  one->raw_delete(nullptr);
  CHECK(allocated() == 0);
}

void pools_are_left_alone() {
  auto* one = native::get();
  one->beginAllocateToPool(0, {1, 0}, [](cudaStream_t) { return true; });
  const c10::DataPtr inside = one->allocate(8 * kMiB);
  CHECK(!memplan_owns(inside.get()));
  one->endAllocateToPool(0, {1, 0});
  const c10::DataPtr after = one->allocate(8 * kMiB);
  CHECK(memplan_owns(after.get()));
}

// Requests of both are recorded, in order; what is alive as if requested now.
void what_the_native_allocator_serves_is_recorded() {
  auto* one = native::get();
  const c10::DataPtr before = one->allocate(20 * kMiB);
  memplan_record(0, 100);
  {
    const c10::DataPtr planned = one->allocate(4 * kMiB);
    const c10::DataPtr other = one->allocate(30 * kMiB);
    one->recordStream(other, c10::cuda::getCurrentCUDAStream(0));
    CHECK(memplan_owns(planned.get()) && !memplan_owns(other.get()));
  }
  memplan_stop_recording(0);
  memplan_event events[10];
  const std::int64_t count = memplan_take_events(0, events, 10, nullptr);
  const std::int32_t kinds[] = {MEMPLAN_EVENT_ALLOC, MEMPLAN_EVENT_ALLOC, MEMPLAN_EVENT_ALLOC,
                                MEMPLAN_EVENT_RECORD_STREAM, MEMPLAN_EVENT_FREE,
                                MEMPLAN_EVENT_FREE};
  const std::int64_t bytes[] = {20, 4, 30, 30, 30, 4}, storages[] = {0, 1, 2, 2, 2, 1};
  CHECK(count == 6);
  for (int at = 0; at < 6; ++at) {
    CHECK(events[at].kind == kinds[at] && events[at].bytes == bytes[at] * kMiB);
    CHECK(events[at].storage == storages[at]);
  }
}

void out_of_memory_gives_the_arena_up() {
  auto* one = native::get();
  { const c10::DataPtr mapped = one->allocate(4 * kMiB); }
  stand_in().failures = 1;
  const c10::DataPtr large = one->allocate(500 * kMiB);
  CHECK(stand_in().blocks.count(large.get()) == 1);
  CHECK(one->getDeviceStats(0).reserved_bytes[0].current == 500 * kMiB);
  const c10::DataPtr next = one->allocate(8 * kMiB);
  CHECK(!memplan_owns(next.get()));
  stand_in().failures = 2;
  bool raised = false;
  try {
    one->allocate(500 * kMiB);
  } catch (const c10::OutOfMemoryError&) {
    raised = true;
  }
  CHECK(raised && stand_in().failures == 1);
}

}  // namespace

int main(int count, char** words) {
  CHECK(count == 3);
  memplan_use_driver(words[2]);
  native::allocator.store(&stand_in());
  CHECK(memplan_adaptor_install("/nowhere.so") == -1);
  CHECK(memplan_adaptor_install(words[1]) == 0 && memplan_adaptor_install(words[1]) == 1);
  CHECK(native::get() != &stand_in() && native::get()->name() == "native");
  native::get()->init(1);
  CHECK(native::get()->initialized());
  places_and_sums();
  raw_pointers_and_refusals();
  pools_are_left_alone();
  what_the_native_allocator_serves_is_recorded();
  out_of_memory_gives_the_arena_up();
  std::puts("all is well");
  return 0;
}

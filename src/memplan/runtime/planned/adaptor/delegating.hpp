// A CUDAAllocator that passes every call to another one. Which functions there are depends on the
// version of PyTorch: 2.11 to 2.15.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>
#include <torch/headeronly/version.h>

#include <functional>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#if TORCH_VERSION_MAJOR != 2 || TORCH_VERSION_MINOR < 11
#error "memplan's adaptor is for PyTorch 2.11 and later"
#endif
#define MEMPLAN_TORCH(minor) (TORCH_VERSION_MINOR >= (minor))

namespace memplan::adaptor {

namespace native = c10::cuda::CUDACachingAllocator;
using c10::DeviceIndex;
using c10::MempoolId_t;

class Delegating : public native::CUDAAllocator {
 public:
  explicit Delegating(native::CUDAAllocator* next) : next_(next) {}

  c10::DataPtr allocate(size_t bytes) override { return next_->allocate(bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return next_->raw_deleter(); }
  bool is_simple_data_ptr(const c10::DataPtr& data) const override {
    return next_->is_simple_data_ptr(data);
  }
  void copy_data(void* to, const void* from, size_t count) const override {
    next_->copy_data(to, from, count);
  }

  bool initialized() override { return next_->initialized(); }
  void emptyCache(MempoolId_t pool) override { next_->emptyCache(pool); }
  using CUDAAllocator::recordStream;
  void recordStream(const c10::DataPtr& data, c10::cuda::CUDAStream stream) override {
    next_->recordStream(data, stream);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    return next_->getDeviceStats(device);
  }
  void resetAccumulatedStats(DeviceIndex device) override { next_->resetAccumulatedStats(device); }
  void resetPeakStats(DeviceIndex device) override { next_->resetPeakStats(device); }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    return next_->getMemoryInfo(device);
  }

  void* raw_alloc(size_t bytes) override { return next_->raw_alloc(bytes); }
  void* raw_alloc_with_stream(size_t bytes, cudaStream_t stream) override {
    return next_->raw_alloc_with_stream(bytes, stream);
  }
  void raw_delete(void* pointer) override { next_->raw_delete(pointer); }
  void init(int devices) override { next_->init(devices); }
  double getMemoryFraction(DeviceIndex device) override { return next_->getMemoryFraction(device); }
  void setMemoryFraction(double fraction, DeviceIndex device) override {
    next_->setMemoryFraction(fraction, device);
  }
  std::vector<native::StreamSegmentSize> getExpandableSegmentSizes(DeviceIndex device) override {
    return next_->getExpandableSegmentSizes(device);
  }
  void enable(bool value) override { next_->enable(value); }
  bool isEnabled() const override { return next_->isEnabled(); }
  void cacheInfo(DeviceIndex device, size_t* largest) override {
    next_->cacheInfo(device, largest);
  }
  void* getBaseAllocation(void* pointer, size_t* bytes) override {
    return next_->getBaseAllocation(pointer, bytes);
  }
  native::SnapshotInfo snapshot(MempoolId_t pool, bool traces) override {
    return next_->snapshot(pool, traces);
  }

  void beginAllocateToPool(DeviceIndex device, MempoolId_t pool,
                           std::function<bool(cudaStream_t)> filter) override {
    next_->beginAllocateToPool(device, pool, std::move(filter));
  }
  void endAllocateToPool(DeviceIndex device, MempoolId_t pool) override {
    next_->endAllocateToPool(device, pool);
  }
#if MEMPLAN_TORCH(13)
  void markCaptureBegin(DeviceIndex device) override { next_->markCaptureBegin(device); }
  void markCaptureEnd(DeviceIndex device) override { next_->markCaptureEnd(device); }
  c10::DataPtr allocateWithAddress(size_t bytes, void* address) override {
    return next_->allocateWithAddress(bytes, address);
  }
#endif
  void releasePool(DeviceIndex device, MempoolId_t pool) override {
    next_->releasePool(device, pool);
  }
  int getPoolUseCount(DeviceIndex device, MempoolId_t pool) override {
    return next_->getPoolUseCount(device, pool);
  }
  void createOrIncrefPool(DeviceIndex device, MempoolId_t pool,
                          std::shared_ptr<CUDAAllocator> allocator) override {
    next_->createOrIncrefPool(device, pool, std::move(allocator));
  }
  void setUseOnOOM(DeviceIndex device, MempoolId_t pool, bool use) override {
    next_->setUseOnOOM(device, pool, use);
  }
  void setNoSplit(DeviceIndex device, MempoolId_t pool) override {
    next_->setNoSplit(device, pool);
  }
  bool checkPoolLiveAllocations(DeviceIndex device, MempoolId_t pool,
                                const std::unordered_set<void*>& expected) override {
    return next_->checkPoolLiveAllocations(device, pool, expected);
  }
  std::shared_ptr<native::AllocatorState> getCheckpointState(DeviceIndex device,
                                                             MempoolId_t pool) override {
    return next_->getCheckpointState(device, pool);
  }
  native::CheckpointDelta setCheckpointPoolState(
      DeviceIndex device, std::shared_ptr<native::AllocatorState> state) override {
    return next_->setCheckpointPoolState(device, std::move(state));
  }

  native::ShareableHandle shareIpcHandle(void* pointer) override {
    return next_->shareIpcHandle(pointer);
  }
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override {
    return next_->getIpcDevPtr(std::move(handle));
  }
  void enablePeerAccess(DeviceIndex device, DeviceIndex to) override {
    next_->enablePeerAccess(device, to);
  }
  cudaError_t memcpyAsync(void* to, int to_device, const void* from, int from_device, size_t count,
                          cudaStream_t stream, bool peer_access) override {
    return next_->memcpyAsync(to, to_device, from, from_device, count, stream, peer_access);
  }

  bool isHistoryEnabled() override { return next_->isHistoryEnabled(); }
#if MEMPLAN_TORCH(12)
  std::shared_ptr<c10::GatheredContext> getContextForPointer(const void* pointer) override {
    return next_->getContextForPointer(pointer);
  }
  void attachOomRejectionObserver(native::OomRejectionObserver observer) override {
    next_->attachOomRejectionObserver(std::move(observer));
  }
#endif
  void recordHistory(bool enabled, native::CreateContextFn recorder, size_t entries,
                     native::RecordContext when, bool clear,
                     const std::vector<std::string>& skip) override {
    next_->recordHistory(enabled, recorder, entries, when, clear, skip);
  }
  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& data) override {
    next_->recordAnnotation(data);
  }
  void pushCompileContext(std::string& data) override { next_->pushCompileContext(data); }
  void popCompileContext() override { next_->popCompileContext(); }
  void setUserMetadata(const std::string& data) override { next_->setUserMetadata(data); }
  std::string getUserMetadata() override { return next_->getUserMetadata(); }
#if MEMPLAN_TORCH(15)
  bool supportsUserMetadata() override { return next_->supportsUserMetadata(); }
  void annotateMemory(const void* pointer, const std::string& data) override {
    next_->annotateMemory(pointer, data);
  }
#endif
  void attachOutOfMemoryObserver(native::OutOfMemoryObserver observer) override {
    next_->attachOutOfMemoryObserver(std::move(observer));
  }
  void attachAllocatorTraceTracker(native::AllocatorTraceTracker tracker) override {
    next_->attachAllocatorTraceTracker(std::move(tracker));
  }
  // The native one's: "native" is what PyTorch asks for before it uses graphs and pools.
  std::string name() override { return next_->name(); }

 protected:
  native::CUDAAllocator* const next_;
};

}  // namespace memplan::adaptor

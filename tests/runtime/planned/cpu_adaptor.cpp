// Gives PyTorch's CPU tensors memory from the planned allocator, so that real training runs on it
// where there is no GPU. Every block is filled with a pattern of NaNs when it is given and when it
// is taken back: tensors that shared bytes would show it in the losses.

#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <sys/types.h>

#include <cstddef>
#include <cstring>
#include <mutex>
#include <unordered_map>

namespace {

constexpr int kPattern = 0xFF;  // NaN in every floating-point type.

using Malloc = void* (*)(ssize_t, int, void*);
using Free = void (*)(void*, ssize_t, int, void*);

Malloc planned_malloc = nullptr;
Free planned_free = nullptr;

class PlannedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (bytes == 0) return {nullptr, nullptr, &give_back, cpu};
    void* pointer = planned_malloc(static_cast<ssize_t>(bytes), 0, nullptr);
    TORCH_CHECK_WITH(OutOfMemoryError, pointer != nullptr, "the planned allocator has no ", bytes,
                     " bytes");
    std::memset(pointer, kPattern, bytes);
    const std::lock_guard lock(mutex_);
    sizes_.emplace(pointer, bytes);
    return {pointer, pointer, &give_back, cpu};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }

  void copy_data(void* to, const void* from, std::size_t count) const override {
    default_copy_data(to, from, count);
  }

 private:
  static void give_back(void* pointer);

  std::mutex mutex_;
  std::unordered_map<void*, std::size_t> sizes_;
};

PlannedAllocator& instance() {
  static auto* const allocator = new PlannedAllocator;  // Never destroyed.
  return *allocator;
}

void PlannedAllocator::give_back(void* pointer) {
  if (pointer == nullptr) return;
  PlannedAllocator& self = instance();
  std::size_t bytes = 0;
  {
    const std::lock_guard lock(self.mutex_);
    const auto found = self.sizes_.find(pointer);
    TORCH_INTERNAL_ASSERT(found != self.sizes_.end(), "a block given back twice");
    bytes = found->second;
    self.sizes_.erase(found);
  }
  std::memset(pointer, kPattern, bytes);
  planned_free(pointer, static_cast<ssize_t>(bytes), 0, nullptr);
}

}  // namespace

// From now on CPU tensors get their memory from `library`, the path of libmemplan_planned.so.
// 0, or -1 when it is not that.
extern "C" int cpu_adaptor_install(const char* library) {
  void* handle = dlopen(library, RTLD_NOW | RTLD_GLOBAL);
  if (handle == nullptr) return -1;
  planned_malloc = reinterpret_cast<Malloc>(dlsym(handle, "memplan_malloc"));
  planned_free = reinterpret_cast<Free>(dlsym(handle, "memplan_free"));
  if (planned_malloc == nullptr || planned_free == nullptr) return -1;
  constexpr std::uint8_t kOverAll = 255;
  c10::SetAllocator(c10::DeviceType::CPU, &instance(), kOverAll);
  return 0;
}

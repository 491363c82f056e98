#include "planned/driver.hpp"

#include <dlfcn.h>

#include <atomic>
#include <mutex>

namespace memplan::planned {

namespace {

struct Loader {
  std::mutex mutex;
  bool tried = false;
  std::string path = "libcuda.so.1";
  std::string error;
  Driver table{};
  std::atomic<const Driver*> ready{nullptr};
  std::atomic<const char*> why{""};

  template <typename Function>
  void find(void* library, const char* symbol, Function& function) {
    void* address = dlsym(library, symbol);
    if (address == nullptr && error.empty()) error = path + " has no " + symbol;
    function = reinterpret_cast<Function>(address);
  }

  void load() {
    tried = true;
    // It stays loaded until the process ends.
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      const char* reason = dlerror();
      error = reason != nullptr ? reason : "cannot load " + path;
    } else {
      find_all(library);
    }
    if (error.empty()) {
      const Result result = table.init(0);
      if (result != kSuccess) error = "the CUDA driver does not start: " + name_of(table, result);
    }
    if (error.empty()) {
      ready.store(&table, std::memory_order_release);
    } else {
      why.store(error.c_str(), std::memory_order_release);
    }
  }

  void find_all(void* library) {
    find(library, "cuInit", table.init);
    find(library, "cuDeviceGet", table.device_get);
    find(library, "cuDeviceGetAttribute", table.device_attribute);
    find(library, "cuDeviceCanAccessPeer", table.can_access_peer);
    find(library, "cuDeviceTotalMem_v2", table.total_memory);
    find(library, "cuDevicePrimaryCtxRetain", table.primary_retain);
    find(library, "cuCtxPushCurrent_v2", table.context_push);
    find(library, "cuCtxPopCurrent_v2", table.context_pop);
    find(library, "cuCtxSynchronize", table.context_synchronize);
    find(library, "cuMemAlloc_v2", table.mem_alloc);
    find(library, "cuMemFree_v2", table.mem_free);
    find(library, "cuMemGetAllocationGranularity", table.granularity);
    find(library, "cuMemAddressReserve", table.address_reserve);
    find(library, "cuMemAddressFree", table.address_free);
    find(library, "cuMemCreate", table.create);
    find(library, "cuMemRelease", table.release);
    find(library, "cuMemMap", table.map);
    find(library, "cuMemUnmap", table.unmap);
    find(library, "cuMemSetAccess", table.set_access);
    find(library, "cuEventCreate", table.event_create);
    find(library, "cuEventDestroy_v2", table.event_destroy);
    find(library, "cuEventRecord", table.event_record);
    find(library, "cuEventQuery", table.event_query);
    find(library, "cuStreamWaitEvent", table.stream_wait_event);
    find(library, "cuGetErrorName", table.error_name);
  }
};

// Never destroyed: threads may still release memory while the process ends.
Loader& loader() {
  static Loader* one = new Loader;
  return *one;
}

}  // namespace

const Driver* driver() {
  Loader& one = loader();
  if (const Driver* ready = one.ready.load(std::memory_order_acquire)) return ready;
  const std::lock_guard guard(one.mutex);
  if (!one.tried) one.load();
  return one.ready.load(std::memory_order_acquire);
}

void use_driver(const char* path) {
  Loader& one = loader();
  const std::lock_guard guard(one.mutex);
  if (!one.tried && path != nullptr) one.path = path;
}

const char* driver_error() { return loader().why.load(std::memory_order_acquire); }

void set_driver_error(const std::string& reason) {
  Loader& one = loader();
  const std::lock_guard guard(one.mutex);
  if (!one.error.empty()) return;
  one.error = reason;
  one.why.store(one.error.c_str(), std::memory_order_release);
}

std::string name_of(const Driver& driver, Result result) {
  const char* name = nullptr;
  if (driver.error_name(result, &name) == kSuccess && name != nullptr) return name;
  return "error " + std::to_string(result);
}

}  // namespace memplan::planned

// A stand-in for the CUDA driver over host memory, for machines without a GPU: the functions that
// the planned allocator loads, with what a driver promises and no more. Memory that is not mapped,
// or not made accessible, faults when it is touched; streams can be made to lag; calls can fail.
//
// STANDIN_CUDA_BYTES: memory of a device (80 GiB; only what is touched is really taken).
// STANDIN_CUDA_DEVICES: how many (1). STANDIN_CUDA_NO_PAGES: the device cannot map pages.
// STANDIN_CUDA_FAIL: "cuMemCreate:3,cuMemMap:-5", as by `standin_fail`.
#include "standin_cuda.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace {

using Result = int;
using Address = unsigned long long;

constexpr Result kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kInvalidDevice = 101;
constexpr Result kNotReady = 600, kUnknown = 999;
constexpr std::size_t kPage = std::size_t{2} << 20;
constexpr int kMostDevices = 16;

struct Location {
  int type, id;
};
struct Properties {
  int type, handle_types;
  Location location;
};
struct Access {
  Location location;
  int flags;
};

struct Physical {
  int device;
  std::size_t bytes;
  off_t where;  // In the file that stands for all devices' memory.
  int mappings = 0;
  bool released = false;
};
struct Mapping {
  std::size_t bytes;
  std::uint64_t handle;
};
struct Segment {
  int device;
  std::size_t bytes;
};

// Whether a piece of work is done; false while it has to wait.
using Work = std::function<bool()>;
using StreamKey = std::pair<int, void*>;

struct EventState {
  std::uint64_t recorded = 0;  // The last record, and the last that the stream has reached.
  std::uint64_t reached = 0;
};

struct Injection {
  std::int64_t calls = 0;
  std::int64_t at = 0;  // The call that fails; 0 for none.
  bool onwards = false;
  bool often = false;  // One that can fail at random.
};

class Machine {
 public:
  Machine() {
    file_ = memfd_create("standin-cuda", MFD_CLOEXEC);
    if (const char* bytes = std::getenv("STANDIN_CUDA_BYTES")) capacity_ = std::atoll(bytes);
    if (const char* count = std::getenv("STANDIN_CUDA_DEVICES")) devices_ = std::atoi(count);
    if (devices_ < 1 || devices_ > kMostDevices) devices_ = 1;
    pages_ = std::getenv("STANDIN_CUDA_NO_PAGES") == nullptr;
    for (const char* name :
         {"cuCtxSynchronize", "cuMemAlloc", "cuMemFree", "cuMemAddressReserve", "cuMemAddressFree",
          "cuMemCreate", "cuMemRelease", "cuMemMap", "cuMemUnmap", "cuMemSetAccess",
          "cuEventCreate", "cuEventDestroy", "cuEventRecord", "cuEventQuery",
          "cuStreamWaitEvent"}) {
      injections_[name];
    }
    // What lacks memory or other resources; those that give back fail by name only.
    for (const char* name :
         {"cuCtxSynchronize", "cuMemAlloc", "cuMemAddressReserve", "cuMemCreate", "cuMemMap",
          "cuMemSetAccess", "cuEventCreate", "cuEventRecord", "cuStreamWaitEvent"}) {
      injections_[name].often = true;
    }
    if (const char* list = std::getenv("STANDIN_CUDA_FAIL")) read_failures(list);
  }

  std::mutex mutex;

  bool has_pages() const { return pages_; }
  int devices() const { return devices_; }
  std::int64_t capacity() const { return capacity_; }
  void set_capacity(std::int64_t bytes) { capacity_ = bytes; }
  std::int64_t used(int device) const { return used_[device]; }
  std::int64_t faults() const { return faults_; }

  Result fault(const char* what) {
    if (faults_++ == 0) std::fprintf(stderr, "stand-in CUDA driver: %s\n", what);
    return kInvalidValue;
  }

  bool inject(const char* name, std::int64_t n) {
    const auto found = injections_.find(name);
    if (found == injections_.end()) return false;
    Injection& one = found->second;
    one.at = n == 0 ? 0 : one.calls + std::abs(n);
    one.onwards = n < 0;
    return true;
  }
  void inject_often(std::int64_t of_a_million, std::uint64_t seed) {
    often_ = of_a_million;
    random_ = seed * 2 + 1;
  }
  std::int64_t calls(const char* name) const {
    const auto found = injections_.find(name);
    return found == injections_.end() ? -1 : found->second.calls;
  }
  // Counts the call; whether it is to fail.
  bool fails(const char* name) {
    Injection& one = injections_.find(name)->second;
    ++one.calls;
    if (one.at > 0 && (one.calls == one.at || (one.onwards && one.calls > one.at))) return true;
    if (often_ == 0 || !one.often) return false;
    random_ ^= random_ << 13;
    random_ ^= random_ >> 7;
    random_ ^= random_ << 17;
    return static_cast<std::int64_t>(random_ % 1'000'000) < often_;
  }

  // ---- Memory ------------------------------------------------------------------------------

  Result allocate(int device, std::size_t bytes, Address* address) {
    if (bytes == 0) return kInvalidValue;
    const std::size_t size = (bytes + kPage - 1) / kPage * kPage;
    if (!take(device, size)) return kOutOfMemory;
    void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return give(device, size), kOutOfMemory;
    *address = reinterpret_cast<Address>(memory);
    segments_[*address] = {device, size};
    return kSuccess;
  }

  Result free(Address address) {
    const auto found = segments_.find(address);
    if (found == segments_.end()) return fault("cuMemFree of what is not allocated");
    munmap(reinterpret_cast<void*>(address), found->second.bytes);
    give(found->second.device, found->second.bytes);
    segments_.erase(found);
    return kSuccess;
  }

  Result reserve(Address* address, std::size_t bytes) {
    if (bytes == 0 || bytes % kPage != 0) return fault("cuMemAddressReserve of an odd size");
    const std::size_t size = bytes + kPage;  // To align it.
    void* memory = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1,
                        0);
    if (memory == MAP_FAILED) return kOutOfMemory;
    const auto begin = reinterpret_cast<Address>(memory);
    *address = (begin + kPage - 1) / kPage * kPage;
    if (*address > begin) munmap(memory, *address - begin);
    const Address end = *address + bytes;
    if (begin + size > end) munmap(reinterpret_cast<void*>(end), begin + size - end);
    reservations_[*address] = bytes;
    return kSuccess;
  }

  Result unreserve(Address address, std::size_t bytes) {
    const auto found = reservations_.find(address);
    if (found == reservations_.end() || found->second != bytes) {
      return fault("cuMemAddressFree of what is not reserved");
    }
    const auto inside = mappings_.lower_bound(address);
    if (inside != mappings_.end() && inside->first < address + bytes) {
      return fault("cuMemAddressFree with something mapped");
    }
    munmap(reinterpret_cast<void*>(address), bytes);
    reservations_.erase(found);
    return kSuccess;
  }

  Result create(int device, std::size_t bytes, std::uint64_t* handle) {
    if (bytes == 0 || bytes % kPage != 0) return fault("cuMemCreate of an odd size");
    if (!take(device, bytes)) return kOutOfMemory;
    *handle = ++last_handle_;
    physical_[*handle] = {device, bytes, file_end_};
    file_end_ += static_cast<off_t>(bytes);
    if (ftruncate(file_, file_end_) != 0) return fault("no file for memory");
    return kSuccess;
  }

  Result release(std::uint64_t handle) {
    const auto found = physical_.find(handle);
    if (found == physical_.end() || found->second.released) {
      return fault("cuMemRelease of what is not there");
    }
    found->second.released = true;
    collect(found);
    return kSuccess;
  }

  Result map(Address address, std::size_t bytes, std::uint64_t handle) {
    const auto found = physical_.find(handle);
    if (found == physical_.end() || found->second.released || found->second.bytes != bytes) {
      return fault("cuMemMap of what is not there");
    }
    if (!reserved(address, bytes) || overlaps(address, bytes)) {
      return fault("cuMemMap to addresses that are taken or not reserved");
    }
    void* memory = mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE,
                        MAP_SHARED | MAP_FIXED | MAP_NORESERVE, file_, found->second.where);
    if (memory == MAP_FAILED) return kOutOfMemory;
    ++found->second.mappings;
    mappings_[address] = {bytes, handle};
    return kSuccess;
  }

  Result unmap(Address address, std::size_t bytes) {
    const auto found = mappings_.find(address);
    if (found == mappings_.end() || found->second.bytes != bytes) {
      return fault("cuMemUnmap of what is not mapped");
    }
    mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    const auto physical = physical_.find(found->second.handle);
    --physical->second.mappings;
    mappings_.erase(found);
    collect(physical);
    return kSuccess;
  }

  Result set_access(Address address, std::size_t bytes) {
    for (Address at = address; at < address + bytes;) {
      const auto found = mappings_.find(at);
      if (found == mappings_.end()) return fault("cuMemSetAccess of what is not mapped");
      at += found->second.bytes;
    }
    mprotect(reinterpret_cast<void*>(address), bytes, PROT_READ | PROT_WRITE);
    return kSuccess;
  }

  std::int64_t count(const std::string& what) const {
    const std::map<std::string, std::size_t> counts{{"handles", physical_.size()},
                                                    {"mappings", mappings_.size()},
                                                    {"reservations", reservations_.size()},
                                                    {"segments", segments_.size()},
                                                    {"events", events_.size()}};
    const auto found = counts.find(what);
    return found == counts.end() ? -1 : static_cast<std::int64_t>(found->second);
  }

  // ---- Streams -----------------------------------------------------------------------------

  void lag(bool on) {
    lags_ = on;
    if (!on) drain();
  }
  void give_work(StreamKey stream, Work work) {
    std::deque<Work>& queue = streams_[stream];
    if (queue.empty() && !lags_ && work()) return;
    queue.push_back(std::move(work));
  }
  bool step(std::uint64_t choice) {
    if (streams_.empty()) return false;
    auto at = std::next(streams_.begin(), static_cast<std::ptrdiff_t>(choice % streams_.size()));
    for (std::size_t tries = 0; tries < streams_.size(); ++tries) {
      if (run_next(at->second)) return true;
      if (++at == streams_.end()) at = streams_.begin();
    }
    return false;
  }
  void drain() {
    while (step(0)) {
    }
  }

  void* new_event() {
    const auto event = reinterpret_cast<void*>(++last_event_);
    events_[event] = std::make_shared<EventState>();
    return event;
  }
  bool has_event(void* event) const { return events_.count(event) > 0; }
  void drop_event(void* event) { events_.erase(event); }
  bool reached(void* event) const {
    const EventState& state = *events_.at(event);
    return state.reached >= state.recorded;
  }
  void record(void* event, StreamKey stream) {
    const std::shared_ptr<EventState> state = events_.at(event);
    const std::uint64_t number = ++state->recorded;
    give_work(stream, [state, number] {
      state->reached = std::max(state->reached, number);
      return true;
    });
  }
  // For the last record before; an event that is destroyed meanwhile still counts.
  void wait(StreamKey stream, void* event) {
    const std::shared_ptr<const EventState> state = events_.at(event);
    const std::uint64_t number = state->recorded;
    give_work(stream, [state, number] { return state->reached >= number; });
  }

 private:
  bool take(int device, std::size_t bytes) {
    const auto size = static_cast<std::int64_t>(bytes);
    if (size > capacity_ - used_[device]) return false;
    used_[device] += size;
    return true;
  }
  void give(int device, std::size_t bytes) { used_[device] -= static_cast<std::int64_t>(bytes); }

  bool reserved(Address address, std::size_t bytes) const {
    const auto after = reservations_.upper_bound(address);
    if (after == reservations_.begin()) return false;
    const auto found = std::prev(after);
    return address + bytes <= found->first + found->second;
  }
  bool overlaps(Address address, std::size_t bytes) const {
    const auto after = mappings_.lower_bound(address + bytes);
    if (after == mappings_.begin()) return false;
    const auto before = std::prev(after);
    return before->first + before->second.bytes > address;
  }
  void collect(std::map<std::uint64_t, Physical>::iterator physical) {
    const Physical& one = physical->second;
    if (!one.released || one.mappings > 0) return;
    fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, one.where,
              static_cast<off_t>(one.bytes));
    give(one.device, one.bytes);
    physical_.erase(physical);
  }
  static bool run_next(std::deque<Work>& queue) {
    if (queue.empty() || !queue.front()()) return false;
    queue.pop_front();
    return true;
  }
  void read_failures(const std::string& list) {
    for (std::size_t from = 0; from < list.size();) {
      const std::size_t end = std::min(list.find(',', from), list.size());
      const std::string item = list.substr(from, end - from);
      const std::size_t colon = item.find(':');
      const std::int64_t n = colon == std::string::npos ? 1 : std::atoll(&item[colon + 1]);
      if (!inject(item.substr(0, colon).c_str(), n)) fault("STANDIN_CUDA_FAIL names no function");
      from = end + 1;
    }
  }

  int file_ = -1;
  off_t file_end_ = 0;
  std::int64_t capacity_ = std::int64_t{80} << 30;
  int devices_ = 1;
  bool pages_ = true;
  std::int64_t used_[kMostDevices] = {};
  std::map<Address, Segment> segments_;
  std::map<Address, std::size_t> reservations_;
  std::map<Address, Mapping> mappings_;
  std::map<std::uint64_t, Physical> physical_;
  std::uint64_t last_handle_ = 0;
  std::map<StreamKey, std::deque<Work>> streams_;
  std::map<void*, std::shared_ptr<EventState>> events_;
  std::uintptr_t last_event_ = 0;
  bool lags_ = false;
  std::map<std::string, Injection, std::less<>> injections_;
  std::int64_t often_ = 0;
  std::uint64_t random_ = 1;
  std::int64_t faults_ = 0;
};

Machine& machine() {
  static Machine* one = new Machine;
  return *one;
}

thread_local std::vector<int> contexts;

int current_device() { return contexts.empty() ? -1 : contexts.back(); }

int device_of(void* context) {
  return static_cast<int>(reinterpret_cast<std::uintptr_t>(context)) - 1;
}

// Runs a driver function under the machine's mutex; the failure of its name comes first.
template <typename Action>
Result call(const char* name, Result failure, Action action) {
  Machine& one = machine();
  const std::lock_guard guard(one.mutex);
  if (one.fails(name)) return failure;
  return action(one);
}

}  // namespace

extern "C" {

Result cuInit(unsigned) { return kSuccess; }

Result cuDeviceGet(int* device, int ordinal) {
  if (ordinal < 0 || ordinal >= machine().devices()) return kInvalidDevice;
  *device = ordinal;
  return kSuccess;
}

Result cuDeviceGetCount(int* count) {
  *count = machine().devices();
  return kSuccess;
}

Result cuDeviceGetAttribute(int* value, int attribute, int) {
  constexpr int kVirtualMemory = 102;
  *value = attribute == kVirtualMemory && machine().has_pages() ? 1 : 0;
  return kSuccess;
}

Result cuDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return kSuccess;
}

Result cuDeviceTotalMem_v2(std::size_t* bytes, int) {
  const std::lock_guard guard(machine().mutex);
  *bytes = static_cast<std::size_t>(machine().capacity());
  return kSuccess;
}

Result cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = reinterpret_cast<void*>(static_cast<std::uintptr_t>(device) + 1);
  return kSuccess;
}

Result cuCtxPushCurrent_v2(void* context) {
  contexts.push_back(device_of(context));
  return kSuccess;
}

Result cuCtxPopCurrent_v2(void** context) {
  if (contexts.empty()) return kInvalidValue;
  *context = reinterpret_cast<void*>(static_cast<std::uintptr_t>(contexts.back()) + 1);
  contexts.pop_back();
  return kSuccess;
}

Result cuCtxSynchronize() {
  return call("cuCtxSynchronize", kUnknown, [](Machine& one) {
    one.drain();
    return kSuccess;
  });
}

Result cuMemGetInfo_v2(std::size_t* free, std::size_t* total) {
  const std::lock_guard guard(machine().mutex);
  const int device = current_device() < 0 ? 0 : current_device();
  *total = static_cast<std::size_t>(machine().capacity());
  *free = static_cast<std::size_t>(machine().capacity() - machine().used(device));
  return kSuccess;
}

Result cuMemAlloc_v2(Address* address, std::size_t bytes) {
  return call("cuMemAlloc", kOutOfMemory, [&](Machine& one) {
    if (current_device() < 0) return one.fault("cuMemAlloc without a context");
    return one.allocate(current_device(), bytes, address);
  });
}

Result cuMemFree_v2(Address address) {
  return call("cuMemFree", kUnknown, [&](Machine& one) { return one.free(address); });
}

Result cuMemGetAllocationGranularity(std::size_t* bytes, const Properties*, int) {
  *bytes = kPage;
  return kSuccess;
}

Result cuMemAddressReserve(Address* address, std::size_t bytes, std::size_t, Address,
                           unsigned long long) {
  return call("cuMemAddressReserve", kOutOfMemory,
              [&](Machine& one) { return one.reserve(address, bytes); });
}

Result cuMemAddressFree(Address address, std::size_t bytes) {
  return call("cuMemAddressFree", kUnknown,
              [&](Machine& one) { return one.unreserve(address, bytes); });
}

Result cuMemCreate(std::uint64_t* handle, std::size_t bytes, const Properties* properties,
                   unsigned long long) {
  return call("cuMemCreate", kOutOfMemory, [&](Machine& one) {
    const int device = properties->location.id;
    if (properties->type != 1 || properties->location.type != 1 || device < 0 ||
        device >= one.devices()) {
      return one.fault("cuMemCreate with odd properties");
    }
    return one.create(device, bytes, handle);
  });
}

Result cuMemRelease(std::uint64_t handle) {
  return call("cuMemRelease", kUnknown, [&](Machine& one) { return one.release(handle); });
}

Result cuMemMap(Address address, std::size_t bytes, std::size_t, std::uint64_t handle,
                unsigned long long) {
  return call("cuMemMap", kUnknown,
              [&](Machine& one) { return one.map(address, bytes, handle); });
}

Result cuMemUnmap(Address address, std::size_t bytes) {
  return call("cuMemUnmap", kUnknown, [&](Machine& one) { return one.unmap(address, bytes); });
}

Result cuMemSetAccess(Address address, std::size_t bytes, const Access* access, std::size_t count) {
  return call("cuMemSetAccess", kUnknown, [&](Machine& one) {
    if (count == 0 || access->flags != 3) return one.fault("cuMemSetAccess with odd flags");
    return one.set_access(address, bytes);
  });
}

Result cuEventCreate(void** event, unsigned) {
  return call("cuEventCreate", kOutOfMemory, [&](Machine& one) {
    *event = one.new_event();
    return kSuccess;
  });
}

Result cuEventDestroy_v2(void* event) {
  return call("cuEventDestroy", kUnknown, [&](Machine& one) {
    if (!one.has_event(event)) return one.fault("cuEventDestroy of what is no event");
    one.drop_event(event);
    return kSuccess;
  });
}

Result cuEventRecord(void* event, void* stream) {
  return call("cuEventRecord", kUnknown, [&](Machine& one) {
    if (!one.has_event(event)) return one.fault("cuEventRecord of what is no event");
    if (current_device() < 0) return one.fault("cuEventRecord without a context");
    one.record(event, {current_device(), stream});
    return kSuccess;
  });
}

Result cuEventQuery(void* event) {
  return call("cuEventQuery", kUnknown, [&](Machine& one) {
    if (!one.has_event(event)) return one.fault("cuEventQuery of what is no event");
    return one.reached(event) ? kSuccess : kNotReady;
  });
}

Result cuStreamWaitEvent(void* stream, void* event, unsigned) {
  return call("cuStreamWaitEvent", kUnknown, [&](Machine& one) {
    if (!one.has_event(event)) return one.fault("cuStreamWaitEvent for what is no event");
    if (current_device() < 0) return one.fault("cuStreamWaitEvent without a context");
    one.wait({current_device(), stream}, event);
    return kSuccess;
  });
}

Result cuGetErrorName(Result result, const char** name) {
  *name = result == kOutOfMemory ? "CUDA_ERROR_OUT_OF_MEMORY"
          : result == kSuccess   ? "CUDA_SUCCESS"
                                 : "CUDA_ERROR_UNKNOWN";
  return kSuccess;
}

void standin_lag(int on) {
  const std::lock_guard guard(machine().mutex);
  machine().lag(on != 0);
}

void standin_launch(int device, void* stream, void (*work)(void*), void* argument) {
  const std::lock_guard guard(machine().mutex);
  machine().give_work({device, stream}, [work, argument] {
    work(argument);
    return true;
  });
}

void standin_pass(int device, void* from, void* to) {
  const std::lock_guard guard(machine().mutex);
  void* event = machine().new_event();
  machine().record(event, {device, from});
  machine().wait({device, to}, event);
  machine().drop_event(event);
}

int standin_step(std::uint64_t choice) {
  const std::lock_guard guard(machine().mutex);
  return machine().step(choice) ? 1 : 0;
}

int standin_fail(const char* function, std::int64_t n) {
  const std::lock_guard guard(machine().mutex);
  return machine().inject(function, n) ? 1 : 0;
}

void standin_fail_often(std::int64_t of_a_million, std::uint64_t seed) {
  const std::lock_guard guard(machine().mutex);
  machine().inject_often(of_a_million, seed);
}

void standin_set_bytes(std::int64_t bytes) {
  const std::lock_guard guard(machine().mutex);
  machine().set_capacity(bytes);
}

std::int64_t standin_used(int device) {
  const std::lock_guard guard(machine().mutex);
  return device >= 0 && device < kMostDevices ? machine().used(device) : -1;
}

std::int64_t standin_calls(const char* function) {
  const std::lock_guard guard(machine().mutex);
  return machine().calls(function);
}

std::int64_t standin_count(const char* what) {
  const std::lock_guard guard(machine().mutex);
  return machine().count(what);
}

std::int64_t standin_faults(void) {
  const std::lock_guard guard(machine().mutex);
  return machine().faults();
}

}  // extern "C"

#include "planned/c_api.h"

#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>

#include "planned/device.hpp"
#include "planned/driver.hpp"

namespace {

using memplan::planned::Device;

constexpr std::size_t kMostDevices = 128;
// Never destroyed: memory is still released while the process ends.
std::array<std::atomic<Device*>, kMostDevices> devices{};

Device* existing(int number) {
  const auto row = static_cast<std::size_t>(number);
  return row < kMostDevices ? devices[row].load(std::memory_order_acquire) : nullptr;
}

// A child of the process has no CUDA, and a lock may have been taken when it was forked: there is no
// device in it, and what it releases stays.
void forget_devices() {
  for (std::atomic<Device*>& slot : devices) slot.store(nullptr, std::memory_order_relaxed);
}

[[gnu::noinline]] Device* new_device(int number) {
  if (number < 0 || static_cast<std::size_t>(number) >= kMostDevices) return nullptr;
  static std::mutex mutex;
  const std::lock_guard guard(mutex);
  [[maybe_unused]] static const int told = pthread_atfork(nullptr, nullptr, &forget_devices);
  std::atomic<Device*>& slot = devices[static_cast<std::size_t>(number)];
  if (slot.load(std::memory_order_relaxed) == nullptr) {
    auto fresh = std::make_unique<Device>(number);
    for (std::size_t row = 0; row < kMostDevices; ++row) {
      Device* other = devices[row].load(std::memory_order_relaxed);
      if (other == nullptr) continue;
      other->add_peer(number);
      fresh->add_peer(static_cast<int>(row));
    }
    slot.store(fresh.release(), std::memory_order_release);
  }
  return slot.load(std::memory_order_relaxed);
}

Device* device(int number) {
  Device* one = existing(number);
  return one != nullptr ? one : new_device(number);
}

// Calls `action` on the device and then on all others until one returns true.
template <typename Action>
bool on_any(int first, Action action) {
  if (Device* one = existing(first); one != nullptr && action(*one)) return true;
  for (const std::atomic<Device*>& slot : devices) {
    Device* one = slot.load(std::memory_order_acquire);
    if (one != nullptr && one != existing(first) && action(*one)) return true;
  }
  return false;
}

// No exception may pass through C. The host being out of memory is all that can be thrown.
template <typename Result, typename Action>
Result guarded(Result otherwise, Action action) noexcept {
  try {
    return action();
  } catch (const std::exception&) {
    return otherwise;
  }
}

template <typename Action>
void on_existing(int number, Action action) noexcept {
  guarded(0, [&] {
    if (Device* one = existing(number)) action(*one);
    return 0;
  });
}

template <typename Action>
void on_device(int number, Action action) noexcept {
  guarded(0, [&] {
    if (Device* one = device(number)) action(*one);
    return 0;
  });
}

void* allocate(std::int64_t bytes, int number, memplan_stream stream, bool planned_only) noexcept {
  return guarded(static_cast<void*>(nullptr), [&]() -> void* {
    Device* one = device(number);
    return one != nullptr ? one->malloc(bytes, stream, planned_only) : nullptr;
  });
}

int refuse(const std::string& reason, char* why, std::size_t room) {
  if (why != nullptr && room > 0) {
    const std::size_t length = std::min(reason.size(), room - 1);
    std::memcpy(why, reason.data(), length);
    why[length] = '\0';
  }
  return -1;
}

std::string mebibytes(std::int64_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

std::string no_memory(std::int64_t bytes, int number) {
  Device* one = device(number);
  if (one == nullptr) return "there is no CUDA device " + std::to_string(number);
  const std::string reason = one->reason();
  memplan_statistics now{};
  one->statistics(now);
  std::string text = "CUDA out of memory. Tried to allocate " + mebibytes(bytes) + " on GPU " +
                     std::to_string(number) + ": " + mebibytes(now.reserved) +
                     " are reserved (memplan), of which " + mebibytes(now.allocated) +
                     " are in use.";
  if (!reason.empty()) text += " The driver said: " + reason + ".";
  return text;
}

}  // namespace

void* memplan_malloc(ssize_t bytes, int number, memplan_stream stream) {
  return allocate(bytes, number, stream, false);
}

void* memplan_malloc_planned(ssize_t bytes, int number, memplan_stream stream) {
  return allocate(bytes, number, stream, true);
}

void* memplan_torch_malloc(ssize_t bytes, int number, memplan_stream stream) {
  void* pointer = memplan_malloc(bytes, number, stream);
  if (pointer == nullptr && bytes > 0) throw std::runtime_error(no_memory(bytes, number));
  return pointer;
}

void memplan_free(void* pointer, ssize_t, int number, memplan_stream) {
  if (pointer == nullptr) return;
  guarded(false, [&] {
    return on_any(number, [pointer](Device& one) { return one.free(pointer); });
  });
}

void memplan_record_stream(void* pointer, memplan_stream stream) {
  if (pointer == nullptr) return;
  guarded(false, [&] {
    return on_any(0, [&](Device& one) { return one.record_stream(pointer, stream); });
  });
}

int memplan_owns(const void* pointer) {
  return guarded(false, [&] {
    return on_any(0, [pointer](Device& one) { return one.owns(pointer); });
  });
}

void memplan_empty_cache(int number) {
  on_existing(number, [](Device& one) { one.empty_cache(); });
}

void memplan_torch_empty_cache(void) {
  for (std::size_t row = 0; row < kMostDevices; ++row) memplan_empty_cache(static_cast<int>(row));
}

int memplan_load(int number, const memplan_plan* plan, int in_round, char* why, size_t room) {
  try {
    if (plan == nullptr || plan->abi != MEMPLAN_ABI) {
      return refuse("the plan is for another version of the library", why, room);
    }
    Device* one = device(number);
    if (one == nullptr) return refuse("there is no such device", why, room);
    const std::string reason = one->load(memplan::planned::make_plan(*plan), in_round != 0);
    return reason.empty() ? 0 : refuse(reason, why, room);
  } catch (const std::exception& error) {
    return refuse(error.what(), why, room);
  }
}

void memplan_unload(int number) {
  on_existing(number, [](Device& one) { one.unload(); });
}

void memplan_enter_phase(int number, int32_t phase) {
  on_existing(number, [phase](Device& one) { one.enter_phase(phase); });
}

int memplan_read_statistics(int number, memplan_statistics* statistics) {
  return guarded(-1, [&] {
    Device* one = existing(number);
    if (one == nullptr || statistics == nullptr) return -1;
    one->statistics(*statistics);
    return 0;
  });
}

void memplan_reset_peaks(int number) {
  on_existing(number, [](Device& one) { one.reset_peaks(); });
}

void memplan_count(int number, int64_t allocated, int64_t requested, int64_t reserved) {
  on_device(number, [&](Device& one) { one.count(allocated, requested, reserved); });
}

int64_t memplan_snapshot(int number, memplan_block* blocks, int64_t room) {
  return guarded(std::int64_t{0}, [&] {
    Device* one = existing(number);
    return one != nullptr ? one->snapshot(blocks, room) : 0;
  });
}

void memplan_record(int number, int64_t most) {
  on_device(number, [most](Device& one) { one.record(most); });
}

void memplan_stop_recording(int number) {
  on_existing(number, [](Device& one) { one.stop_recording(); });
}

int64_t memplan_take_events(int number, memplan_event* events, int64_t room, int64_t* lost) {
  return guarded(std::int64_t{0}, [&] {
    Device* one = existing(number);
    if (one == nullptr && lost != nullptr) *lost = 0;
    return one != nullptr ? one->take_events(events, room, lost) : 0;
  });
}

void memplan_note_malloc(int number, const void* pointer, int64_t bytes, memplan_stream stream) {
  on_device(number, [&](Device& one) { one.note_malloc(pointer, bytes, stream); });
}

void memplan_note_free(int number, const void* pointer) {
  on_existing(number, [pointer](Device& one) { one.note_free(pointer); });
}

void memplan_mark(int number, int64_t value) {
  on_existing(number, [value](Device& one) { one.mark(value); });
}

void memplan_mark_stream(int number, int64_t value, memplan_stream stream) {
  on_existing(number, [value, stream](Device& one) { one.mark_stream(value, stream); });
}

void memplan_set_limit(int number, int64_t bytes) {
  on_device(number, [bytes](Device& one) { one.set_limit(bytes); });
}

void memplan_fail_at(int number, int64_t n) {
  on_device(number, [n](Device& one) { one.fail_at(n); });
}

void memplan_use_driver(const char* path) {
  guarded(0, [path] { return memplan::planned::use_driver(path), 0; });
}

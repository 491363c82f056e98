#include "planned/recorder.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>

namespace memplan::planned {

namespace {

std::int32_t this_thread() {
  static std::atomic<std::int32_t> threads{0};
  thread_local const std::int32_t number = threads.fetch_add(1, std::memory_order_relaxed);
  return number;
}

std::int64_t nanoseconds() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

}  // namespace

void Recorder::start(std::int64_t most) {
  events_.clear();
  most_ = std::max<std::int64_t>(most, 0);
  storages_ = lost_ = 0;
  on_ = true;
}

void Recorder::add(std::int32_t kind, std::int64_t bytes, std::int64_t storage,
                   std::int32_t stream) {
  if (static_cast<std::int64_t>(events_.size()) >= most_) {
    ++lost_;
    return;
  }
  events_.push_back({bytes, storage, stream, nanoseconds(), kind, this_thread()});
}

std::int64_t Recorder::take(memplan_event* events, std::int64_t room, std::int64_t* lost) {
  const std::int64_t held = static_cast<std::int64_t>(events_.size());
  const std::int64_t count = events == nullptr ? 0 : std::clamp<std::int64_t>(room, 0, held);
  std::copy(events_.begin(), events_.begin() + count, events);
  events_.erase(events_.begin(), events_.begin() + count);
  if (lost != nullptr) *lost = lost_;
  return count;
}

}  // namespace memplan::planned

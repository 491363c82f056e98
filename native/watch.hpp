#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

namespace memplan {

// A thread that sets a flag at the deadline, or soon after the caller's byte, if there is one, is no
// longer 0.
class Watch {
 public:
  Watch(double seconds, const std::uint8_t* cancel)
      : thread_([this, seconds, cancel] { watch(seconds, cancel); }) {}

  ~Watch() {
    {
      const std::lock_guard lock(mutex_);
      done_ = true;
    }
    wake_.notify_one();
    thread_.join();
  }

  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  const std::atomic<bool>& stopped() const { return stopped_; }

 private:
  void watch(double seconds, const std::uint8_t* cancel) {
    using Clock = std::chrono::steady_clock;
    constexpr auto kLook = std::chrono::milliseconds(20);
    const auto end = Clock::now() + std::chrono::duration<double>(std::clamp(seconds, 0.0, 1e8));
    std::unique_lock lock(mutex_);
    while (!done_) {
      const bool cancelled = cancel != nullptr && __atomic_load_n(cancel, __ATOMIC_RELAXED) != 0;
      if (cancelled || Clock::now() >= end) {
        stopped_ = true;
        return;
      }
      wake_.wait_for(lock, kLook);
    }
  }

  std::atomic<bool> stopped_ = false;
  bool done_ = false;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::thread thread_;
};

}  // namespace memplan

#pragma once

#include <atomic>
#include <chrono>
#include <thread>

namespace memplan::planned {

// Mutual exclusion for sections of some tens of nanoseconds: released by a plain store, so that a
// request and its release cost one locked instruction each.
class Lock {
 public:
  void lock() {
    if (taken_.exchange(true, std::memory_order_acquire)) wait();
  }
  void unlock() { taken_.store(false, std::memory_order_release); }

 private:
  static constexpr int kShortest = 4, kLongest = 64;  // Pauses between attempts.

  // Attempts come at growing distances, so that the owner's next requests are not in each other's
  // way; after some microseconds the owner calls the driver, or has lost its core.
  [[gnu::noinline]] void wait() {
    for (int pauses = kShortest;;) {
      for (int each = 0; each < pauses; ++each) pause();
      if (!taken_.load(std::memory_order_relaxed) &&
          !taken_.exchange(true, std::memory_order_acquire)) {
        return;
      }
      if (pauses < kLongest) {
        pauses *= 2;
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds(50));
        pauses = kShortest;
      }
    }
  }

  static void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  alignas(64) std::atomic<bool> taken_{false};
};

}  // namespace memplan::planned

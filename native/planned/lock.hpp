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
    while (taken_.exchange(true, std::memory_order_acquire)) wait();
  }
  void unlock() { taken_.store(false, std::memory_order_release); }

 private:
  static constexpr int kSpins = 24;

  // Spins for about a microsecond, then sleeps: the owner calls the driver, or has lost its core.
  void wait() const {
    for (int spins = 0; spins < kSpins; ++spins) {
      if (!taken_.load(std::memory_order_relaxed)) return;
      pause();
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
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

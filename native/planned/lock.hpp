#pragma once

#include <atomic>
#include <chrono>
#include <thread>

namespace memplan::planned {

// Mutual exclusion for sections of some tens of nanoseconds: released by a plain store, so that a
// request and its release cost one locked instruction each. Who has to wait long, because the owner
// calls the driver, sleeps.
class Lock {
 public:
  void lock() {
    for (int tries = 0; taken_.exchange(true, std::memory_order_acquire); ++tries) wait(tries);
  }
  void unlock() { taken_.store(false, std::memory_order_release); }

 private:
  void wait(int tries) const {
    for (int spins = 0; spins < 64 && taken_.load(std::memory_order_relaxed); ++spins) pause();
    if (!taken_.load(std::memory_order_relaxed)) return;
    if (tries < 16) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
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

#pragma once

#include <vector>

#include "planned/driver.hpp"

namespace memplan::planned {

// A device of this process, as the driver knows it.
struct Card {
  const Driver& driver;
  DeviceNumber number;
  Context context;  // The primary one, which the CUDA runtime uses too.
  // Other devices that this process uses and that can reach this one's memory: pages are made
  // accessible to them too, as memory of cudaMalloc is once PyTorch has enabled peer access.
  std::vector<DeviceNumber> peers{};
};

// Makes a card's context current in this thread for as long as it lives: memory may be released by
// a thread that has none, or another card's.
class Current {
 public:
  explicit Current(const Card& card)
      : driver_(card.driver), pushed_(driver_.context_push(card.context) == kSuccess) {}
  ~Current() {
    Context popped = nullptr;
    if (pushed_) driver_.context_pop(&popped);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  const Driver& driver_;
  const bool pushed_;
};

}  // namespace memplan::planned

#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "caching/block.hpp"
#include "planned/plan.hpp"

namespace memplan::planned {

inline void* pointer_to(std::uint64_t address) { return reinterpret_cast<void*>(address); }

inline std::uint64_t address_of(const void* pointer) {
  return static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(pointer));
}

struct Range;

// A request that is served and not released.
struct alignas(64) Owner {
  std::uint64_t address = 0;
  std::int64_t requested = 0;
  std::int64_t serial = 0;
  std::int64_t storage = -1;        // Its number in the recording.
  caching::Block* block = nullptr;  // Of the caching allocator; null in an arena.
  Range* range = nullptr;           // The arena it lies in.
  std::int32_t cell = -1;  // Of a planned place: its first cell.
  std::int32_t stream = 0;
  bool missed = false;  // Served by the caching allocator while there was a plan.
  bool shared = false;  // Other streams use it: they are in a table of their own.

  // As counted for `allocated`.
  std::int64_t size() const { return block != nullptr ? block->size : rounded(requested); }
};

// Owners by address: open addressing with linear probing, at most half full. What was erased last is
// used again first, so that what is touched stays in the processor's cache.
class Owners {
 public:
  Owners() : table_(kLeast) {}

  Owner* find(std::uint64_t address) {
    for (std::size_t at = home(address);; at = next(at)) {
      if (table_[at].address == address) return table_[at].owner;
      if (table_[at].address == 0) return nullptr;
    }
  }

  // The address must not be there, and not be 0. Valid until it is erased.
  Owner& insert(std::uint64_t address) {
    if (2 * (count_ + 1) > table_.size()) grow();
    ++count_;
    if (spare_.empty()) spare_.push_back(&owners_.emplace_back());
    Owner* owner = spare_.back();
    spare_.pop_back();
    table_[hole(address)] = {address, owner};
    *owner = Owner{};
    owner->address = address;
    return *owner;
  }

  void erase(Owner* owner) {
    std::size_t empty = home(owner->address);
    while (table_[empty].address != owner->address) empty = next(empty);
    // What probed past the hole moves into it.
    for (std::size_t at = next(empty); table_[at].address != 0; at = next(at)) {
      const std::size_t wanted = home(table_[at].address);
      if (((at - wanted) & mask()) < ((at - empty) & mask())) continue;
      table_[empty] = table_[at];
      empty = at;
    }
    table_[empty].address = 0;
    spare_.push_back(owner);
    --count_;
  }

  template <typename Visit>
  void for_each(Visit visit) {
    for (const Slot& slot : table_) {
      if (slot.address != 0) visit(*slot.owner);
    }
  }

 private:
  static constexpr std::size_t kLeast = 1024;

  struct Slot {
    std::uint64_t address = 0;  // 0: none.
    Owner* owner = nullptr;
  };

  std::size_t mask() const { return table_.size() - 1; }
  std::size_t next(std::size_t at) const { return (at + 1) & mask(); }
  // Fibonacci hashing of the address in units of 512 bytes.
  std::size_t home(std::uint64_t address) const {
    return static_cast<std::size_t>(((address >> 9) * 0x9e3779b97f4a7c15u) >> shift_);
  }
  std::size_t hole(std::uint64_t address) const {
    std::size_t at = home(address);
    while (table_[at].address != 0) at = next(at);
    return at;
  }

  void grow() {
    std::vector<Slot> old(2 * table_.size());
    std::swap(old, table_);
    --shift_;
    for (const Slot& slot : old) {
      if (slot.address != 0) table_[hole(slot.address)] = slot;
    }
  }

  std::vector<Slot> table_;  // A power of two long.
  std::deque<Owner> owners_;
  std::vector<Owner*> spare_;
  std::size_t count_ = 0;
  int shift_ = 64 - std::countr_zero(kLeast);
};

}  // namespace memplan::planned

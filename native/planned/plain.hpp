#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <set>
#include <unordered_map>
#include <vector>

namespace memplan::planned {

// A plain best-fit caching allocator, for `speed.cpp` to compare with: ordered sets of free blocks
// for small and for large requests, a table of what is in use, one lock. Sizes of blocks and of
// segments are PyTorch's. The memory behind its addresses does not exist.
class PlainAllocator {
 public:
  void* malloc(std::int64_t bytes, void* stream) {
    const std::lock_guard lock(mutex_);
    const std::int64_t size = bytes < kUnit ? kUnit : (bytes + kUnit - 1) / kUnit * kUnit;
    Pool& pool = size <= kSmall ? small_ : large_;
    Block* block = take_free(pool, size, stream);
    if (block == nullptr) block = new_segment(pool, size, stream);
    const std::int64_t rest = block->size - size;
    if (rest >= (&pool == &small_ ? kUnit : kSmall + 1)) split(pool, block, size);
    block->in_use = true;
    in_use_.emplace(block->address, block);
    return reinterpret_cast<void*>(block->address);
  }

  void free(void* pointer) {
    const std::lock_guard lock(mutex_);
    const auto found = in_use_.find(reinterpret_cast<std::int64_t>(pointer));
    Block* block = found->second;
    in_use_.erase(found);
    block->in_use = false;
    Pool& pool = *block->pool;
    if (block->next != nullptr && !block->next->in_use) absorb_next(pool, block);
    if (block->previous != nullptr && !block->previous->in_use) {
      block = block->previous;
      pool.erase(block);
      absorb_next(pool, block, false);
    }
    pool.insert(block);
  }

 private:
  struct Block;
  struct BySize {
    bool operator()(const Block* a, const Block* b) const {
      if (a->stream != b->stream) return a->stream < b->stream;
      return a->size != b->size ? a->size < b->size : a->address < b->address;
    }
  };
  using Pool = std::set<Block*, BySize>;
  struct Block {
    std::int64_t address = 0;
    std::int64_t size = 0;
    void* stream = nullptr;
    Pool* pool = nullptr;
    Block* previous = nullptr;
    Block* next = nullptr;
    bool in_use = false;
  };

  static constexpr std::int64_t kUnit = 512;
  static constexpr std::int64_t kMiB = std::int64_t{1} << 20;
  static constexpr std::int64_t kSmall = kMiB;

  Block* take_free(Pool& pool, std::int64_t size, void* stream) {
    Block key;
    key.size = size;
    key.stream = stream;
    const auto found = pool.lower_bound(&key);
    if (found == pool.end() || (*found)->stream != stream) return nullptr;
    Block* block = *found;
    pool.erase(found);
    return block;
  }

  Block* new_block(std::int64_t address, std::int64_t size, void* stream, Pool* pool) {
    Block* block = nullptr;
    if (spare_.empty()) {
      block = &blocks_.emplace_back();
    } else {
      block = spare_.back();
      spare_.pop_back();
    }
    *block = Block{address, size, stream, pool};
    return block;
  }

  Block* new_segment(Pool& pool, std::int64_t size, void* stream) {
    std::int64_t bytes = (size + 2 * kMiB - 1) / (2 * kMiB) * (2 * kMiB);
    if (&pool == &large_ && size < 10 * kMiB) bytes = 20 * kMiB;
    Block* block = new_block(top_, bytes, stream, &pool);
    top_ += bytes + kMiB;
    return block;
  }

  void split(Pool& pool, Block* block, std::int64_t size) {
    Block* rest = new_block(block->address + size, block->size - size, block->stream, &pool);
    rest->previous = block;
    rest->next = block->next;
    if (rest->next != nullptr) rest->next->previous = rest;
    block->next = rest;
    block->size = size;
    pool.insert(rest);
  }

  void absorb_next(Pool& pool, Block* block, bool listed = true) {
    Block* next = block->next;
    if (listed) pool.erase(next);
    block->size += next->size;
    block->next = next->next;
    if (block->next != nullptr) block->next->previous = block;
    spare_.push_back(next);
  }

  std::mutex mutex_;
  Pool small_, large_;
  std::unordered_map<std::int64_t, Block*> in_use_;
  std::deque<Block> blocks_;
  std::vector<Block*> spare_;
  std::int64_t top_ = std::int64_t{1} << 40;
};

}  // namespace memplan::planned

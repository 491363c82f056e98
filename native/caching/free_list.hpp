#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace memplan::caching {

struct Block;

// Orders cached blocks for best fit: by size, then by address.
struct FreeKey {
  std::int64_t size;
  std::int64_t address;
  Block* block;

  bool operator<(const FreeKey& other) const {
    return size != other.size ? size < other.size : address < other.address;
  }
};

// A sorted set of keys in chunks of bounded length. Replays spend their time here: moving some
// hundred bytes within a chunk is faster than rebalancing a tree and allocating its nodes.
class FreeList {
 public:
  // Valid until the next insertion or erasure.
  struct Position {
    std::size_t chunk;
    std::size_t index;
    bool operator==(const Position&) const = default;
  };

  Position begin() const { return {0, 0}; }
  Position end() const { return {chunks_.size(), 0}; }
  const FreeKey& at(Position position) const { return chunks_[position.chunk][position.index]; }

  Position next(Position position) const {
    if (++position.index == chunks_[position.chunk].size()) return {position.chunk + 1, 0};
    return position;
  }

  Position previous(Position position) const {
    if (position.index > 0) return {position.chunk, position.index - 1};
    return {position.chunk - 1, chunks_[position.chunk - 1].size() - 1};
  }

  // The first key that is not less.
  Position lower_bound(const FreeKey& key) const {
    const auto chunk = std::partition_point(
        chunks_.begin(), chunks_.end(), [&key](const Chunk& c) { return c.back() < key; });
    if (chunk == chunks_.end()) return end();
    const auto place = std::lower_bound(chunk->begin(), chunk->end(), key);
    return {static_cast<std::size_t>(chunk - chunks_.begin()),
            static_cast<std::size_t>(place - chunk->begin())};
  }

  void insert(const FreeKey& key) {
    if (chunks_.empty()) {
      chunks_.emplace_back().reserve(kLongest);
      chunks_.front().push_back(key);
      return;
    }
    Position place = lower_bound(key);
    if (place == end()) place = {chunks_.size() - 1, chunks_.back().size()};
    if (chunks_[place.chunk].size() == kLongest) {
      split(place.chunk);
      if (place.index > kLongest / 2) place = {place.chunk + 1, place.index - kLongest / 2};
    }
    Chunk& chunk = chunks_[place.chunk];
    chunk.insert(chunk.begin() + static_cast<std::ptrdiff_t>(place.index), key);
  }

  void erase(Position position) {
    Chunk& chunk = chunks_[position.chunk];
    chunk.erase(chunk.begin() + static_cast<std::ptrdiff_t>(position.index));
    if (chunk.empty()) chunks_.erase(chunks_.begin() + static_cast<std::ptrdiff_t>(position.chunk));
  }

 private:
  using Chunk = std::vector<FreeKey>;  // Sorted, never empty.
  static constexpr std::size_t kLongest = 64;

  void split(std::size_t row) {
    Chunk upper;
    upper.reserve(kLongest);
    const auto middle = chunks_[row].begin() + static_cast<std::ptrdiff_t>(kLongest / 2);
    upper.assign(middle, chunks_[row].end());
    chunks_[row].erase(middle, chunks_[row].end());
    chunks_.insert(chunks_.begin() + static_cast<std::ptrdiff_t>(row) + 1, std::move(upper));
  }

  std::vector<Chunk> chunks_;
};

}  // namespace memplan::caching

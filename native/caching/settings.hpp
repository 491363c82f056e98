#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <limits>

// Sizes and rounding rules of PyTorch's CUDA caching allocator (c10/core/AllocatorConfig.h and
// c10/cuda/CUDACachingAllocator.cpp of torch 2.11 to 2.13). All sizes are bytes.
namespace memplan::caching {

inline constexpr std::int64_t kMiB = std::int64_t{1} << 20;
inline constexpr std::int64_t kMinBlock = 512;
inline constexpr std::int64_t kSmallRequest = kMiB;         // Largest request of the small pool.
inline constexpr std::int64_t kSmallSegment = 2 * kMiB;
inline constexpr std::int64_t kMinOwnSegment = 10 * kMiB;   // From here on a segment per request.
inline constexpr std::int64_t kSegmentGranularity = 2 * kMiB;
inline constexpr std::int64_t kUnlimited = std::numeric_limits<std::int64_t>::max();
// Above these a trace is nonsense, and sums of int64 could overflow.
inline constexpr std::int64_t kMaxRequest = std::int64_t{1} << 48;
inline constexpr std::int64_t kMaxTotal = std::int64_t{1} << 60;

// One interval per power of two from 1 MiB to 32 GiB; the last one is open above.
inline constexpr std::size_t kRoundupIntervals = 16;

struct Settings {
  bool expandable_segments = false;
  bool throw_on_cudamalloc_oom = false;
  std::int64_t max_split_size = kUnlimited;
  std::int64_t max_non_split_rounding = 20 * kMiB;
  std::int64_t large_segment_size = 20 * kMiB;
  double garbage_collection_threshold = 0.0;  // 0 is off.
  std::array<std::int64_t, kRoundupIntervals> roundup_divisions{};
  std::int64_t allowed_bytes = kUnlimited;   // per_process_memory_fraction x device memory.
  std::int64_t capacity_bytes = kUnlimited;  // What cudaMalloc can hand out to this process.
  std::int64_t reserve_bytes = 0;            // Address space of one expandable segment.
};

constexpr std::int64_t round_up(std::int64_t bytes, std::int64_t multiple) {
  return (bytes + multiple - 1) / multiple * multiple;
}

// Next division of the power-of-two interval that holds `bytes`; `divisions` is a power of two.
constexpr std::int64_t round_up_division(std::int64_t bytes, std::int64_t divisions) {
  const auto value = static_cast<std::uint64_t>(bytes);
  if (std::has_single_bit(value)) return bytes;
  const auto floor = static_cast<std::int64_t>(std::bit_floor(value));
  const std::int64_t step = floor / divisions;
  return step == 0 ? 2 * floor : round_up(bytes, step);
}

inline std::int64_t block_size(const Settings& settings, std::int64_t bytes) {
  if (bytes < kMinBlock) return kMinBlock;
  const int log2 = static_cast<int>(std::bit_width(static_cast<std::uint64_t>(bytes))) - 1;
  const int interval = std::clamp(log2 - 20, 0, static_cast<int>(kRoundupIntervals) - 1);
  const std::int64_t divisions = settings.roundup_divisions[static_cast<std::size_t>(interval)];
  if (divisions > 1 && bytes > kMinBlock * divisions) return round_up_division(bytes, divisions);
  return round_up(bytes, kMinBlock);
}

inline std::int64_t segment_size(const Settings& settings, std::int64_t block_bytes) {
  if (block_bytes <= kSmallRequest) return kSmallSegment;
  if (block_bytes < kMinOwnSegment) return settings.large_segment_size;
  return round_up(block_bytes, kSegmentGranularity);
}

}  // namespace memplan::caching

#include "caching/address_space.hpp"

#include <iterator>
#include <stdexcept>
#include <utility>

namespace memplan::caching {

namespace {
constexpr std::int64_t kChunk = 32 * kMiB;
constexpr int kMostRounds = 2;
}

AddressSpace::AddressSpace(std::vector<ObservedSegment> observed)
    : observed_(std::move(observed)) {}

bool AddressSpace::is_free(std::int64_t address, std::int64_t bytes) const {
  auto after = taken_.lower_bound(address);
  if (after != taken_.end() && after->first < address + bytes) return false;
  if (after == taken_.begin()) return true;
  const auto before = std::prev(after);
  return before->first + before->second <= address;
}

bool AddressSpace::claim(std::int64_t address, std::int64_t bytes) {
  if (!is_free(address, bytes)) return false;
  taken_.emplace(address, bytes);
  return true;
}

std::int64_t AddressSpace::model(std::int64_t bytes) {
  if (bytes <= chunk_left_) {
    const std::int64_t address = chunk_next_;
    chunk_next_ += bytes;
    chunk_left_ -= bytes;
    return address;
  }
  const std::int64_t chunk = round_up(bytes, kChunk);
  if (chunk >= lowest_) {  // From the top again: what was released leaves room.
    if (chunk >= kTop || ++rounds_ > kMostRounds) {
      throw std::length_error("the segments alive leave no address space for another one");
    }
    lowest_ = kTop;
  }
  lowest_ -= chunk;
  chunk_next_ = lowest_ + bytes;
  chunk_left_ = chunk - bytes;
  return lowest_;
}

std::int64_t AddressSpace::place(std::int64_t event, std::int64_t bytes, std::int32_t stream,
                                 bool expandable) {
  std::int64_t seen = -1;
  for (; next_observed_ < observed_.size() && observed_[next_observed_].event < event;
       ++next_observed_) {
    const ObservedSegment& candidate = observed_[next_observed_];
    if (candidate.stream == stream && candidate.mapped == expandable &&
        (expandable || candidate.bytes == bytes)) {
      seen = candidate.address;
    }
  }
  if (seen >= 0 && claim(seen, bytes)) return seen;
  rounds_ = 0;
  std::int64_t address = model(bytes);
  while (!claim(address, bytes)) address = model(bytes);
  return address;
}

}  // namespace memplan::caching

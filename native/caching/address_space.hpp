#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "caching/segment_source.hpp"
#include "caching/settings.hpp"

namespace memplan::caching {

// A device allocation that a log shows; only its address is ever used.
struct ObservedSegment {
  std::int64_t event;
  std::int64_t bytes;
  std::int64_t address;
  std::int32_t stream;
  bool mapped;  // Pages of an expandable segment rather than a cudaMalloc.
};

// Virtual addresses of segments. Best fit breaks ties by address, so they matter.
//
// The model follows what logs of cudaMalloc on Linux show: address space is taken in chunks of
// 32 MiB, each below all earlier ones; a segment that fits into what is left of the latest chunk
// goes there instead. Addresses are not used twice until they run out. Where the log shows the
// address that the device gave for the same size on the same stream just before this event, that
// one is used.
class AddressSpace final : public SegmentSource {
 public:
  explicit AddressSpace(std::vector<ObservedSegment> observed);

  std::int64_t place(std::int64_t event, std::int64_t bytes, std::int32_t stream,
                     bool expandable) override;
  void release(std::int64_t address, std::int64_t) override { taken_.erase(address); }
  bool claim(std::int64_t address, std::int64_t bytes) override;
  bool is_free(std::int64_t address, std::int64_t bytes) const override;

 private:
  std::int64_t model(std::int64_t bytes);

  std::vector<ObservedSegment> observed_;
  std::size_t next_observed_ = 0;
  std::map<std::int64_t, std::int64_t> taken_;  // Address to bytes.
  // Below any address that CUDA gives on 64-bit Linux, so modelled segments sort like new ones.
  static constexpr std::int64_t kTop = std::int64_t{1} << 46;
  std::int64_t lowest_ = kTop;
  std::int64_t chunk_next_ = 0;
  std::int64_t chunk_left_ = 0;
  int rounds_ = 0;  // Times that the search for one place began at the top.
};

}  // namespace memplan::caching

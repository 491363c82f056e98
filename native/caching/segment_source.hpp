#pragma once

#include <cstdint>

namespace memplan::caching {

// Where segments come from: the model of a device, or the memory of a real one.
class SegmentSource {
 public:
  static constexpr std::int64_t kNone = -1;

  virtual ~SegmentSource() = default;
  // Address of a new segment, or of the range reserved for an expandable one; kNone when the device
  // has no memory for it.
  virtual std::int64_t place(std::int64_t event, std::int64_t bytes, std::int32_t stream,
                             bool expandable) = 0;
  virtual void release(std::int64_t address, std::int64_t bytes) = 0;
  // Whole pages of an expandable segment. False, with nothing mapped, when the device has none.
  virtual bool map(std::int64_t, std::int64_t) { return true; }
  virtual void unmap(std::int64_t, std::int64_t) {}
  // Takes a range known from elsewhere; false when it overlaps one that is taken.
  virtual bool claim(std::int64_t, std::int64_t) { return false; }
  virtual bool is_free(std::int64_t, std::int64_t) const { return false; }
};

}  // namespace memplan::caching

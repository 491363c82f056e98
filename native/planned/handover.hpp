#pragma once

#include <cstdint>
#include <vector>

#include "planned/plan.hpp"

namespace memplan::planned {

// Which stream used each cell last, and where the event of its release is: what a request of another
// stream has to wait for. Costs nothing while there is one stream.
class Handover {
 public:
  explicit Handover(const Plan& plan) : count_(static_cast<std::size_t>(plan.cells())) {}

  // Cells [first, last) pass to a request; in `after`, distinct: slots of releases, or -1 - s for
  // all that stream s has done so far.
  void take(std::int32_t first, std::int32_t last, std::int32_t stream,
            std::vector<std::int32_t>& after) {
    if (streams_.empty() || streams_.back() != stream) see(stream);
    if (several_streams()) pass(first, last, stream, after);
  }
  // A request lets go of them; `whole` when it had all their bytes for itself.
  void release(std::int32_t first, std::int32_t last, std::int32_t stream, bool whole) {
    if (several_streams()) leave(first, last, stream, whole);
  }
  // The last release is in this slot.
  void released_in(std::int32_t slot);

  // Whether this stream is the one that has been seen.
  bool only(std::int32_t stream) const {
    return uses_.empty() && !streams_.empty() && streams_.back() == stream;
  }
  bool several_streams() const { return !uses_.empty(); }

 private:
  static constexpr std::int32_t kSeveral = -2;  // As a stream: wait for all.
  static constexpr std::int32_t kNoSlot = -1;
  struct Use {
    std::int32_t stream;
    std::int32_t slot;
  };

  void see(std::int32_t stream);
  void pass(std::int32_t first, std::int32_t last, std::int32_t stream,
            std::vector<std::int32_t>& after) const;
  void leave(std::int32_t first, std::int32_t last, std::int32_t stream, bool whole);

  std::size_t count_;
  std::vector<std::int32_t> streams_;  // Seen so far.
  std::vector<Use> uses_;              // By cell; empty while one stream has been seen.
  std::int32_t first_ = 0, last_ = 0, stream_ = 0;  // Of the last release.
};

}  // namespace memplan::planned

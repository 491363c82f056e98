#pragma once

#include <cstdint>
#include <map>

namespace memplan::caching {

// What the host and each stream know to have passed on the other streams (vector clocks).
//
// A mark is a point in a stream's work. A stream that waits for a CUDA event comes after all that
// the recording stream had been given or waited for until then; so does the host once it
// synchronizes with a stream.
class StreamClocks {
 public:
  // A new mark at the end of what `stream` has been given.
  std::int64_t mark(std::int32_t stream) { return ++tail_[stream]; }
  void record(std::int32_t stream, std::int64_t event);
  void wait(std::int32_t stream, std::int64_t event);
  void synchronize(std::int32_t stream);
  void synchronize_all();
  // The latest mark of `stream` that the host knows to have passed; 0 for none.
  std::int64_t passed(std::int32_t stream) const;

 private:
  using Clock = std::map<std::int32_t, std::int64_t>;  // Stream to its latest mark known passed.

  Clock at_tail(std::int32_t stream) const;
  static void join(Clock& into, const Clock& from);

  Clock tail_;
  Clock host_;
  std::map<std::int32_t, Clock> waited_;
  std::map<std::int64_t, Clock> events_;
};

}  // namespace memplan::caching

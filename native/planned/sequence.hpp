#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "planned/plan.hpp"

namespace memplan::planned {

// The request of the plan that one of the job is, on the same stream.
struct Match {
  std::int32_t row = -1;  // -1: the plan has none for it.
  bool equal = false;     // In bytes; else it is that row in another size.
};

// Finds for each request of a job the row of the plan that it is, without seeing what follows.
//
// In step, the next row has the bytes and the stream of the request. Otherwise an alignment of the
// last requests with the plan goes on (edit distance, Needleman and Wunsch 1970, in the band of the
// cheapest continuations): a request may be unforeseen, or a row in another size, and rows may have
// been left out. Several hypotheses of where the job is are kept until one has won. When none is
// good, places where the plan reads like the last requests join them.
class Sequence {
 public:
  Sequence(const Plan& plan, bool in_round);

  // The next row where the job is in step and requests just that; else null.
  const Row* expected(std::int64_t bytes, std::int32_t stream) const {
    const Row& row = plan_.row(best_.next);
    return in_step_ && row.bytes == bytes && row.stream == stream ? &row : nullptr;
  }
  // It was requested.
  void advance() { best_.next = plan_.next(best_.next); }
  Match follow(std::int64_t bytes, std::int32_t stream) {
    const std::int32_t at = best_.next;
    const Row& row = plan_.row(at);
    if (!in_step_ || row.stream != stream || (row.bytes != bytes && row.space < 0)) {
      return align(bytes, stream);
    }
    advance();
    return {at, row.bytes == bytes};
  }
  // The row that is expected next.
  std::int32_t next() const { return best_.next; }
  // The job begins a phase of the plan.
  void enter_phase(std::int32_t phase);

  // Times that the place was lost and found again.
  std::int64_t resyncs() const { return resyncs_; }

 private:
  struct Hypothesis {
    std::int32_t next;
    std::int32_t cost;
    float ratio = 1.0F;      // Of the last request that was a row in another size.
    std::int32_t row = -1;   // What the last request is.
    bool equal = false;
  };

  Match align(std::int64_t bytes, std::int32_t stream);
  void keep(const Hypothesis& one);
  void leave_out();
  void take(const Hypothesis& from, std::int64_t bytes, std::int32_t stream, bool known);
  void look_around(std::int64_t bytes, std::int32_t stream);
  void settle();
  bool won() const;

  const Plan& plan_;
  Hypothesis best_;
  bool in_step_ = true;  // There is one hypothesis, with nothing against it.
  std::vector<Hypothesis> live_, fresh_;
  std::vector<std::int32_t> slot_;  // By row: its place in `fresh_`, valid if it names the row.
  // Of the last requests while not in step:
  std::array<std::uint64_t, Plan::kGram> marks_{};
  std::uint32_t recent_ = 0;  // a bit each, 1 for what was no row, or another size.
  bool strayed_ = false;      // A request was no row, or not as the row, since the last time in step.
  std::int64_t resyncs_ = 0;
};

}  // namespace memplan::planned

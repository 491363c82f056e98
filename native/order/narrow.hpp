#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "order/graph.hpp"
#include "order/min_cut.hpp"

namespace memplan::order {

// What holds of every order whose peak is within a budget: which operators run before one operator
// `pivot`, and which after it.
//
// Another operator that cannot run before the pivot within the budget, as the least cut with the
// pivot after it is above, must run after it; and the other way round. What was forced makes the
// cuts of the pivot larger, and so on. Once the cut of the pivot itself is above the budget, no
// order is within it.
class Narrowing {
 public:
  Narrowing(const Graph& graph, MinCut& cut, const std::atomic<bool>& stopped);

  // False when it is proved that no order keeps the peak within `budget`; `bytes` is then the
  // least that was seen above the budget where it counted, so that less is impossible, too.
  bool run(Op pivot, std::int64_t budget);

  std::int64_t bytes() const { return bytes_; }
  const std::vector<Op>& before() const { return before_; }  // forced, in the order found
  const std::vector<Op>& after() const { return after_; }
  // After run() was true: the operators of a state from which the pivot can run.
  const std::vector<std::uint8_t>& inside() const { return inside_; }

 private:
  std::int64_t held(Op op, std::span<const Op> before, std::span<const Op> after);
  bool cut_pivot(Op pivot, std::int64_t budget);
  void mark_related(Op pivot);
  bool force_after(Op pivot, std::int64_t budget);
  bool force_before(Op pivot, std::int64_t budget);

  const Graph& graph_;
  MinCut& cut_;
  const std::atomic<bool>& stopped_;
  std::int64_t bytes_ = 0;
  std::int64_t least_ = 0;
  std::vector<Op> before_;
  std::vector<Op> after_;
  std::vector<std::uint8_t> inside_;
  std::vector<std::uint8_t> settled_;  // the pivot, its relatives, and what is forced
};

}  // namespace memplan::order

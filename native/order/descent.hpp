#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "order/graph.hpp"
#include "order/state.hpp"

namespace memplan::order {

enum class Direction { kForward, kBackward };

// From a set of operators on to all of them, or back to none, with no operator above a budget.
//
// The bytes alive after a set of operators are a submodular function of it. So when some larger set
// holds no more bytes than the one that we are at, and no set between the two holds less, every
// order that goes on from here within the budget can be led through that larger set within the
// budget, too: going there is safe, and nothing before it has to be looked at again. (Hill and
// valley: Liu 1987 for trees; Kayaaslan et al. 2018 for series-parallel graphs.) The search goes
// from one such set to the next, lowest first among what is connected to where it began, and takes
// one that holds more only when it has looked at `nodes` sets in vain,
// `climbs` times at most.
class Descent {
 public:
  Descent(const Graph& graph, State& state, Direction direction,
          const std::atomic<bool>& stopped);

  // Appends the operators that it adds to the state, or removes from it, to `path`. False when it
  // cannot go on; the state and the path are then where it got to.
  bool run(std::int64_t budget, std::int32_t nodes, std::int32_t climbs, std::vector<Op>& path);

 private:
  struct Node {
    std::int32_t parent;
    std::int32_t depth;
    std::int64_t bytes;
    std::size_t first, last;  // what leads here from the parent, in steps_
    std::size_t near_first, near_last;  // operators to go on with, in near_pool_
  };

  bool available(Op op) const {
    return forward_ ? state_.can_add(op) : state_.can_remove(op);
  }
  bool passed(Op op) const { return state_.has(op) == forward_; }
  std::span<const Op> next_of(Op op) const {
    return forward_ ? graph_.after[op] : graph_.before[op];
  }
  std::span<const Op> needs_of(Op op) const {
    return forward_ ? graph_.before[op] : graph_.after[op];
  }
  std::int64_t growth(Op op) const {
    return forward_ ? state_.growth_of_add(op) : state_.growth_of_remove(op);
  }
  // Bytes while the operator runs, `grows` being its growth.
  std::int64_t held(Op op, std::int64_t grows) const {
    return state_.bytes() + graph_.transient[static_cast<std::size_t>(op)] +
           (forward_ ? 0 : grows);
  }
  void step(Op op);
  void undo(Op op);
  void settle(std::vector<Op>& candidates, std::vector<Op>& path, std::int64_t budget,
              bool connected);
  bool escape(std::int64_t budget, std::int32_t nodes, std::vector<Op>& path);
  void go_to(std::int32_t node);
  void find_near(Op op, std::vector<Op>& near);
  void climb_to_ready(Op op, std::vector<Op>& near);

  const Graph& graph_;
  State& state_;
  const bool forward_;
  const std::atomic<bool>& stopped_;
  std::int32_t climbs_ = 0;  // left
  std::vector<Op> ready_;

  // Of one escape.
  std::vector<Node> nodes_;
  std::vector<Op> steps_;
  std::vector<Op> near_pool_;
  std::int32_t here_ = 0;
  std::vector<Op> stack_;
};

}  // namespace memplan::order

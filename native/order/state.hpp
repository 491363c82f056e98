#pragma once

#include <cstdint>
#include <vector>

#include "order/graph.hpp"

namespace memplan::order {

// A set of operators that have run, closed under what must run before, and the bytes alive after
// them: they do not depend on the order in which the operators ran.
class State {
 public:
  explicit State(const Graph& graph);

  std::int64_t bytes() const { return bytes_; }
  std::uint64_t hash() const { return hash_; }
  Op count() const { return count_; }
  bool has(Op op) const { return has_[at(op)] != 0; }
  bool can_add(Op op) const { return has_[at(op)] == 0 && waits_[at(op)] == 0; }
  bool can_remove(Op op) const { return has_[at(op)] != 0 && followed_[at(op)] == 0; }

  // By how much the bytes alive grow.
  std::int64_t growth_of_add(Op op) const;
  std::int64_t growth_of_remove(Op op) const;
  void add(Op op);
  void remove(Op op);

 private:
  std::int32_t users(Value value) const {
    return static_cast<std::int32_t>(graph_->users[value].size());
  }

  const Graph* graph_;
  std::vector<std::uint8_t> has_;
  std::vector<std::int32_t> waits_;     // operators before it that have not run
  std::vector<std::int32_t> followed_;  // operators after it that have run
  std::vector<std::int32_t> used_;      // by value: users that have run
  std::int64_t bytes_ = 0;
  std::uint64_t hash_ = 0;
  Op count_ = 0;
};

}  // namespace memplan::order

#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "order/graph.hpp"

namespace memplan::order {

// A maximum flow on arcs that come in pairs, one the reverse of the other: Dinic 1970.
class FlowNetwork {
 public:
  void clear(std::int32_t nodes);
  std::int32_t add_node();
  // Returns the arc's number.
  std::int32_t add_arc(std::int32_t from, std::int32_t to, std::int64_t capacity);
  // Augments what flows until it is most, or at least `enough`; returns by how much.
  std::int64_t run(std::int32_t source, std::int32_t sink, std::int64_t enough = kInfinite);
  // After `run` let as much flow as can.
  bool leads_to_sink(std::int32_t node) const { return level_[at(node)] >= 0; }
  std::int64_t flow(std::int32_t arc) const { return room_[at(arc) + 1]; }

 private:
  bool find_levels(std::int32_t source, std::int32_t sink);
  std::int64_t augment(std::int32_t source, std::int32_t sink, std::int64_t enough);
  std::int64_t push(std::vector<std::int32_t>& path);

  std::vector<std::int32_t> first_;
  std::vector<std::int32_t> next_;
  std::vector<std::int32_t> to_;
  std::vector<std::int64_t> room_;
  std::vector<std::int32_t> level_;
  std::vector<std::int32_t> current_;
  std::vector<std::int32_t> queue_;
};

// Where the flow goes, in rows of the graph's columns.
struct FlowColumns {
  std::span<std::int64_t> share;  // by user of a value: bytes of the value that it answers for
  std::span<std::int64_t> rest;   // by value: bytes for which the end of the step answers
  std::span<std::int64_t> back;   // by dependency: bytes that the later operator hands on
};

// The least bytes alive while an operator runs, whatever ran before it.
//
// What ran before operator v is a set of operators that is closed under what must run before,
// contains all that v needs and nothing that needs v. A value is alive while v runs if its maker is
// in the set and not all of its users are. The least of them is a minimum cut between v's ancestors
// (with what is there before the step) and v with its descendants.
class MinCut {
 public:
  explicit MinCut(const Graph& graph);

  // Bytes alive beside the base and what `op` makes and takes for itself. Operators in
  // `also_before` are to have run before it, those in `also_after` are not.
  std::int64_t solve(Op op, std::span<const Op> also_before = {},
                     std::span<const Op> also_after = {});
  // After `solve`: whether the operator is in the set.
  bool before(Op op) const {
    if (side_[at(op)] != Side::kOpen) return side_[at(op)] == Side::kBefore;
    return node_[at(op)] >= 0 && !network_.leads_to_sink(node_[at(op)]);
  }
  // After `solve`: the flow that proves it, in zeroed columns.
  void flow(const FlowColumns& columns) const;

 private:
  enum class Side : std::uint8_t { kOpen, kBefore, kAfter };
  enum class Answer : std::uint8_t { kUser, kEnd, kBack };
  struct Entry {
    std::int32_t arc;  // -1: it flows in any case
    Answer answer;
    std::size_t row;
    std::int64_t bytes;
  };

  void mark(Op op, const Rows& rows, Side side);
  void add_value(Value value);
  void add_dependencies(Op op);
  std::int32_t node_of(Op op);
  void add_entry(std::int32_t arc, Answer answer, std::size_t row, std::int64_t bytes = 0) {
    entries_.push_back({arc, answer, row, bytes});
  }
  std::size_t user_row(Value value, std::size_t place) const {
    return static_cast<std::size_t>(graph_->users[value].data() - graph_->users[0].data()) + place;
  }

  static constexpr std::int32_t kSource = 0;
  static constexpr std::int32_t kSink = 1;

  const Graph* graph_;
  FlowNetwork network_;
  std::vector<Side> side_;
  std::vector<std::int32_t> node_;
  std::vector<Op> queue_;
  std::vector<Entry> entries_;
  std::int64_t fixed_ = 0;
};

}  // namespace memplan::order

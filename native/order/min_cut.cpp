#include "order/min_cut.hpp"

#include <algorithm>

namespace memplan::order {

void FlowNetwork::clear(std::int32_t nodes) {
  first_.assign(at(nodes), -1);
  next_.clear();
  to_.clear();
  room_.clear();
}

std::int32_t FlowNetwork::add_node() {
  first_.push_back(-1);
  return static_cast<std::int32_t>(first_.size()) - 1;
}

std::int32_t FlowNetwork::add_arc(std::int32_t from, std::int32_t to, std::int64_t capacity) {
  const auto arc = static_cast<std::int32_t>(to_.size());
  to_.insert(to_.end(), {to, from});
  room_.insert(room_.end(), {capacity, 0});
  next_.insert(next_.end(), {first_[at(from)], first_[at(to)]});
  first_[at(from)] = arc;
  first_[at(to)] = arc + 1;
  return arc;
}

std::int64_t FlowNetwork::run(std::int32_t source, std::int32_t sink, std::int64_t enough) {
  std::int64_t total = 0;
  while (total < enough && find_levels(source, sink)) {
    current_ = first_;
    total += augment(source, sink, enough - total);
  }
  return total;
}

// Distances to the sink.
bool FlowNetwork::find_levels(std::int32_t source, std::int32_t sink) {
  level_.assign(first_.size(), -1);
  level_[at(sink)] = 0;
  queue_.assign(1, sink);
  for (std::size_t i = 0; i < queue_.size() && level_[at(source)] < 0; ++i) {
    const std::int32_t node = queue_[i];
    for (std::int32_t arc = first_[at(node)]; arc >= 0; arc = next_[at(arc)]) {
      const std::int32_t from = to_[at(arc)];
      if (room_[at(arc ^ 1)] > 0 && level_[at(from)] < 0) {
        level_[at(from)] = level_[at(node)] + 1;
        queue_.push_back(from);
      }
    }
  }
  return level_[at(source)] >= 0;
}

// A blocking flow on the arcs that lead nearer to the sink.
std::int64_t FlowNetwork::augment(std::int32_t source, std::int32_t sink, std::int64_t enough) {
  std::int64_t total = 0;
  std::vector<std::int32_t> path;
  std::int32_t node = source;
  while (total < enough) {
    if (node == sink) {
      total += push(path);
      node = path.empty() ? source : to_[at(path.back())];
      continue;
    }
    std::int32_t& arc = current_[at(node)];
    while (arc >= 0 && (room_[at(arc)] == 0 || level_[at(to_[at(arc)])] != level_[at(node)] - 1)) {
      arc = next_[at(arc)];
    }
    if (arc >= 0) {
      path.push_back(arc);
      node = to_[at(arc)];
    } else if (node == source) {
      break;
    } else {
      level_[at(node)] = -1;
      node = to_[at(path.back() ^ 1)];
      path.pop_back();
    }
  }
  return total;
}

// As much as the path bears; what is left of the path ends before the first full arc.
std::int64_t FlowNetwork::push(std::vector<std::int32_t>& path) {
  std::int64_t most = kInfinite;
  for (const std::int32_t arc : path) most = std::min(most, room_[at(arc)]);
  std::size_t open = path.size();
  for (std::size_t i = path.size(); i-- > 0;) {
    room_[at(path[i])] -= most;
    room_[at(path[i] ^ 1)] += most;
    if (room_[at(path[i])] == 0) open = i;
  }
  path.resize(open);
  return most;
}

MinCut::MinCut(const Graph& graph)
    : graph_(&graph), side_(at(graph.ops())), node_(at(graph.ops())) {}

std::int64_t MinCut::solve(Op op, std::span<const Op> also_before,
                           std::span<const Op> also_after) {
  std::fill(side_.begin(), side_.end(), Side::kOpen);
  std::fill(node_.begin(), node_.end(), -1);
  network_.clear(2);
  entries_.clear();
  fixed_ = 0;
  for (const Op other : also_before) {
    side_[at(other)] = Side::kBefore;
    mark(other, graph_->before, Side::kBefore);
  }
  for (const Op other : also_after) {
    side_[at(other)] = Side::kAfter;
    mark(other, graph_->after, Side::kAfter);
  }
  mark(op, graph_->before, Side::kBefore);
  mark(op, graph_->after, Side::kAfter);
  side_[at(op)] = Side::kAfter;
  for (Value value = 0; value < graph_->values(); ++value) add_value(value);
  for (Op other = graph_->ops(); other-- > 0;) {  // users first: their nodes call for more
    if (node_[at(other)] >= 0) add_dependencies(other);
  }
  return fixed_ + network_.run(kSource, kSink);
}

// What is reached from `op`, without it.
void MinCut::mark(Op op, const Rows& rows, Side side) {
  queue_.assign(1, op);
  for (std::size_t i = 0; i < queue_.size(); ++i) {
    for (const Op other : rows[queue_[i]]) {
      if (side_[at(other)] != side) {
        side_[at(other)] = side;
        queue_.push_back(other);
      }
    }
  }
}

std::int32_t MinCut::node_of(Op op) {
  std::int32_t& node = node_[at(op)];
  if (node < 0) node = network_.add_node();
  return node;
}

void MinCut::add_value(Value value) {
  const Op maker = graph_->maker[at(value)];
  const std::int64_t bytes = graph_->bytes[at(value)];
  const bool there = maker < 0 || side_[at(maker)] == Side::kBefore;
  if (bytes == 0 || (!there && side_[at(maker)] == Side::kAfter)) return;
  const bool lasts = graph_->lasts[at(value)] != 0;
  if (lasts && maker < 0) return;  // part of the base
  const std::span<const Op> users = graph_->users[value];
  const auto after = std::find_if(users.begin(), users.end(),
                                  [this](Op user) { return side_[at(user)] == Side::kAfter; });
  if (lasts || after != users.end()) {
    const bool end = after == users.end();
    const std::size_t row =
        end ? at(value) : user_row(value, static_cast<std::size_t>(after - users.begin()));
    const std::int32_t arc = there ? -1 : network_.add_arc(node_of(maker), kSink, bytes);
    if (there) fixed_ += bytes;
    add_entry(arc, end ? Answer::kEnd : Answer::kUser, row, bytes);
    return;
  }
  const auto open = std::count_if(users.begin(), users.end(),
                                  [this](Op user) { return side_[at(user)] == Side::kOpen; });
  if (open == 0) return;
  std::int32_t from = there ? kSource : node_of(maker);
  std::int64_t capacity = bytes;
  if (open > 1) {  // its bytes are paid once, however many of its users are missing
    const std::int32_t node = network_.add_node();
    network_.add_arc(from, node, bytes);
    from = node;
    capacity = kInfinite;
  }
  for (std::size_t place = 0; place < users.size(); ++place) {
    if (side_[at(users[place])] != Side::kOpen) continue;
    add_entry(network_.add_arc(from, node_of(users[place]), capacity), Answer::kUser,
              user_row(value, place));
  }
}

// Who has run, so have those before: the flow may go from the later to the earlier one.
void MinCut::add_dependencies(Op op) {
  const std::span<const Op> before = graph_->before[op];
  const auto start = static_cast<std::size_t>(before.data() - graph_->before[0].data());
  for (std::size_t place = 0; place < before.size(); ++place) {
    if (side_[at(before[place])] != Side::kOpen) continue;
    const std::int32_t node = node_of(before[place]);
    add_entry(network_.add_arc(node_[at(op)], node, kInfinite), Answer::kBack,
              start + place);
  }
}

void MinCut::flow(const FlowColumns& columns) const {
  for (const Entry& entry : entries_) {
    const std::int64_t bytes = entry.arc < 0 ? entry.bytes : network_.flow(entry.arc);
    switch (entry.answer) {
      case Answer::kUser: columns.share[entry.row] += bytes; break;
      case Answer::kEnd: columns.rest[entry.row] += bytes; break;
      case Answer::kBack: columns.back[entry.row] += bytes; break;
    }
  }
}

}  // namespace memplan::order

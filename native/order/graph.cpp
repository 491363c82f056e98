#include "order/graph.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "order/state.hpp"

namespace memplan::order {
namespace {

// Rows of a CSR column as pairs. Every item is below `limit`.
void unfold(std::span<const std::int64_t> start, std::span<const std::int64_t> items,
            std::size_t rows, std::size_t limit, std::vector<std::int32_t>& row_of,
            std::vector<std::int32_t>& item_of) {
  if (start.size() != rows + 1 || start[0] != 0 || at(start[rows]) != items.size()) {
    throw std::invalid_argument("rows do not fit");
  }
  for (std::size_t row = 0; row < rows; ++row) {
    if (start[row] > start[row + 1] || at(start[row + 1]) > items.size()) {
      throw std::invalid_argument("rows do not fit");
    }
    for (std::int64_t i = start[row]; i < start[row + 1]; ++i) {
      if (items[at(i)] < 0 || at(items[at(i)]) >= limit) {
        throw std::invalid_argument("an operator does not exist");
      }
      row_of.push_back(static_cast<std::int32_t>(row));
      item_of.push_back(static_cast<std::int32_t>(items[at(i)]));
    }
  }
}

void check_bytes(const Columns& columns) {
  std::int64_t total = 0;
  const auto add = [&total](std::int64_t bytes) {
    if (bytes < 0 || bytes >= kInfinite - total) {
      throw std::invalid_argument("a graph's bytes are negative or too many");
    }
    total += bytes;
  };
  add(columns.base_bytes);
  for (const std::int64_t bytes : columns.bytes) add(bytes);
  const auto [least, most] = std::minmax_element(columns.scratch.begin(), columns.scratch.end());
  if (most == columns.scratch.end()) return;
  add(*least);  // none is negative, so the difference cannot overflow
  add(*most - *least);
}

}  // namespace

Rows::Rows(std::size_t rows, const std::vector<std::int32_t>& from,
           const std::vector<std::int32_t>& to)
    : start_(rows + 1, 0), items_(to.size()) {
  for (const std::int32_t row : from) ++start_[at(row) + 1];
  for (std::size_t row = 0; row < rows; ++row) start_[row + 1] += start_[row];
  std::vector<std::size_t> next(start_.begin(), start_.end() - 1);
  for (std::size_t i = 0; i < to.size(); ++i) items_[next[at(from[i])]++] = to[i];
}

Graph::Graph(const Columns& columns) : base(columns.base_bytes) {
  const std::size_t ops = columns.scratch.size();
  const std::size_t values = columns.bytes.size();
  if (columns.maker.size() != values || columns.lasts.size() != values) {
    throw std::invalid_argument("columns differ in length");
  }
  if (ops >= at(std::numeric_limits<std::int32_t>::max()) ||
      values >= at(std::numeric_limits<std::int32_t>::max())) {
    throw std::invalid_argument("a graph is too large");
  }
  check_bytes(columns);
  std::vector<std::int32_t> later, earlier;
  unfold(columns.before_start, columns.before, ops, ops, later, earlier);
  for (std::size_t i = 0; i < later.size(); ++i) {
    if (earlier[i] >= later[i]) throw std::invalid_argument("a dependency runs backwards");
  }
  before = Rows(ops, later, earlier);
  after = Rows(ops, earlier, later);
  std::vector<std::int32_t> used, user;
  unfold(columns.users_start, columns.users, values, ops, used, user);
  users = Rows(values, used, user);
  uses = Rows(ops, user, used);
  bytes.assign(columns.bytes.begin(), columns.bytes.end());
  lasts.assign(columns.lasts.begin(), columns.lasts.end());
  transient.assign(columns.scratch.begin(), columns.scratch.end());
  stays.assign(ops, 0);
  std::vector<std::int32_t> makers, made;
  for (std::size_t value = 0; value < values; ++value) {
    const std::int64_t op = columns.maker[value];
    if (op < -1 || op >= static_cast<std::int64_t>(ops)) {
      throw std::invalid_argument("a maker does not exist");
    }
    maker.push_back(static_cast<Op>(op));
    const bool stay = lasts[value] != 0 || !users[static_cast<Value>(value)].empty();
    if (op < 0) {
      if (lasts[value] != 0) base += bytes[value];
      continue;
    }
    makers.push_back(static_cast<std::int32_t>(op));
    made.push_back(static_cast<std::int32_t>(value));
    transient[at(op)] += bytes[value];
    if (stay) stays[at(op)] += bytes[value];
  }
  makes = Rows(ops, makers, made);
}

Peak peak_of(const Graph& graph, std::span<const Op> order) {
  if (order.size() != at(graph.ops())) throw std::invalid_argument("no order: its length");
  State state(graph);
  Peak peak{graph.base, -1};
  for (std::size_t place = 0; place < order.size(); ++place) {
    const Op op = order[place];
    if (op < 0 || op >= graph.ops() || !state.can_add(op)) {
      throw std::invalid_argument("no order: an operator runs before its time");
    }
    const std::int64_t bytes = state.bytes() + graph.transient[at(op)];
    if (bytes > peak.bytes) peak = {bytes, static_cast<std::int32_t>(place)};
    state.add(op);
  }
  return peak;
}

}  // namespace memplan::order

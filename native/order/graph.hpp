#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace memplan::order {

using Op = std::int32_t;
using Value = std::int32_t;

// Columns of `memplan.types.graph.Graph`.
struct Columns {
  std::span<const std::int64_t> scratch;
  std::span<const std::int64_t> before_start;
  std::span<const std::int64_t> before;
  std::span<const std::int64_t> bytes;
  std::span<const std::int64_t> maker;
  std::span<const std::uint8_t> lasts;
  std::span<const std::int64_t> users_start;
  std::span<const std::int64_t> users;
  std::int64_t base_bytes = 0;
};

// Rows of numbers behind each other.
class Rows {
 public:
  std::span<const std::int32_t> operator[](std::int32_t row) const {
    const auto at = static_cast<std::size_t>(row);
    return {items_.data() + start_[at], items_.data() + start_[at + 1]};
  }
  // Row `from[i]` gets `to[i]`; within a row the order is that of i.
  Rows(std::size_t rows, const std::vector<std::int32_t>& from,
       const std::vector<std::int32_t>& to);
  Rows() : start_(1, 0) {}

 private:
  std::vector<std::size_t> start_;
  std::vector<std::int32_t> items_;
};

// A step whose operators may run in any order that keeps to their dependencies.
class Graph {
 public:
  // Throws std::invalid_argument for columns that contradict each other or are not in an order
  // that keeps to the dependencies.
  explicit Graph(const Columns& columns);

  Op ops() const { return static_cast<Op>(transient.size()); }
  Value values() const { return static_cast<Value>(bytes.size()); }

  Rows before;  // operators by operator
  Rows after;
  Rows makes;  // values by operator
  Rows uses;   // values by operator, those it makes left out
  Rows users;  // operators by value
  std::vector<std::int64_t> bytes;
  std::vector<Op> maker;
  std::vector<std::uint8_t> lasts;
  std::vector<std::int64_t> transient;  // scratch and what the operator makes
  std::vector<std::int64_t> stays;      // of what it makes, what is alive after it
  std::int64_t base = 0;                // and values that are there before and last
};

// The most bytes held, and the first place in the order where they are.
struct Peak {
  std::int64_t bytes = 0;
  std::int32_t place = -1;
};

// Throws std::invalid_argument for what is no order of the graph's operators.
Peak peak_of(const Graph& graph, std::span<const Op> order);

}  // namespace memplan::order

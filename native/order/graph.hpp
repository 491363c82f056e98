#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace memplan::order {

using Op = std::int32_t;
using Value = std::int32_t;

inline std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

// More than all bytes of a graph together: what is infinite beside them, and no sum overflows.
constexpr std::int64_t kInfinite = std::numeric_limits<std::int64_t>::max() / 4;

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
    return {items_.data() + start_[at(row)], items_.data() + start_[at(row) + 1]};
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
  // Throws std::invalid_argument for columns that contradict each other, are not in an order that
  // keeps to the dependencies, or have too many bytes.
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

#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace memplan::packing {

// What the caller asks: one entry a buffer. Lifetimes are half-open, `fixed` is -1 where free. `twin`
// is the row of a buffer that must have the same offset, which names this one in turn, or -1.
struct Columns {
  std::span<const std::int64_t> lower;
  std::span<const std::int64_t> upper;
  std::span<const std::int64_t> size;
  std::span<const std::int64_t> alignment;
  std::span<const std::int64_t> fixed;
  std::span<const std::int64_t> twin;
};

// A buffer over sections [first, last): the stretches of time between two moments at which any
// buffer begins or ends.
struct Item {
  int first;
  int last;
  std::int64_t size;
  std::int64_t alignment;
  std::int64_t fixed;
  int twin;

  int length() const { return last - first; }
};

// Sizes, alignments and offsets are in units of `unit` bytes: the greatest common divisor of all
// of them, so that heights are as few as they can be.
struct Problem {
  std::vector<Item> items;
  int sections = 0;
  bool twins = false;  // some item has one
  std::int64_t unit = 1;
  std::vector<std::int64_t> load;  // per section
  std::int64_t max_load = 0;
  // No layout is lower: the maximum load, and the top of every fixed buffer.
  std::int64_t bound = 0;
};

// Throws std::invalid_argument where the columns differ in length or an entry makes no sense.
Problem make_problem(const Columns& columns);

inline std::int64_t align_up(std::int64_t value, std::int64_t alignment) {
  const std::int64_t over = value % alignment;
  return over == 0 ? value : value + alignment - over;
}

}  // namespace memplan::packing

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace memplan::recompute {

// A chain of blocks in memory levels (memplan.recompute.segments). Block b owns the options
// option_start[b] to option_start[b + 1], exclusive. `crossing` has count + 1 rows and columns.
struct SegmentChain {
  std::int64_t levels = 0;  // 0 to levels.
  std::vector<std::int64_t> option_start, between, need;
  std::vector<double> option_seconds;
  std::vector<std::int64_t> crossing, through;
  std::vector<double> seconds;  // Of a block's forward.
};

struct SegmentChoice {
  double cost = 0.0;
  std::int64_t option = -1;  // Of the first block, from 0; -1: its segment is skipped.
  std::int64_t middle = -1;  // Where the skipped segment ends.
};

// The table of the dynamic programme over [s, t) and levels.
class SegmentTable {
 public:
  // Throws std::invalid_argument for columns that differ in length.
  explicit SegmentTable(SegmentChain chain);

  // Throws std::invalid_argument outside the table.
  SegmentChoice best(std::int64_t start, std::int64_t stop, std::int64_t level) const;

 private:
  float* cost(std::size_t start, std::size_t stop) {
    return table_.data() + (offset_[start] + (stop - start)) * width_;
  }
  const float* cost(std::size_t start, std::size_t stop) const {
    return table_.data() + (offset_[start] + (stop - start)) * width_;
  }
  void fill(std::size_t start, std::size_t stop);

  SegmentChain chain_;
  std::size_t count_ = 0;
  std::size_t width_ = 0;
  std::vector<std::size_t> offset_;
  std::vector<float> table_;
};

}  // namespace memplan::recompute

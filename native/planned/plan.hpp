#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "planned/c_api.h"
#include "planned/cells.hpp"

namespace memplan::planned {

inline constexpr std::int64_t kBlock = 512;  // Requests take a multiple of this.

constexpr std::int64_t rounded(std::int64_t bytes) { return (bytes + kBlock - 1) & -kBlock; }

// A request of the plan: what is needed to serve it, two in a line of the processor's cache.
struct alignas(32) Row {
  std::int64_t bytes;
  std::int64_t offset;  // -1: it has no place.
  std::int32_t first;   // Its place is the cells [first, last).
  std::int32_t last;
  std::int32_t space;   // Of a dynamic request; else -1.
  std::int16_t stream;  // In the order of first use; 0 is the default one.
  bool shared;          // Other streams have places in these cells.
};

// When it is alive.
struct Life {
  std::int64_t lower;   // Over [lower, upper) on the plan's clock.
  std::int64_t upper;
  std::int64_t moment;  // The clock when it is requested, as far as lifetimes tell.
  std::int32_t phase;   // -1 in the setup.
};

// Cells [first, second) of the arena.
using CellRange = std::pair<std::int32_t, std::int32_t>;

// The tables of a plan. The ends of planned places and of the ranges of spaces cut the arena into
// cells: a planned request takes whole cells.
class Plan {
 public:
  // Throws std::invalid_argument with the reason for columns that cannot be a plan's. Places that
  // overlap are not looked for: an arena gives no byte out twice whatever its plan says.
  explicit Plan(const memplan_plan& columns);

  std::int32_t size() const { return static_cast<std::int32_t>(rows_.size()); }
  std::int32_t setup() const { return setup_; }
  // Rows of a round.
  std::int32_t period() const { return size() - setup_; }
  const Row& row(std::int32_t at) const { return rows_[static_cast<std::size_t>(at)]; }
  const Life& life(std::int32_t at) const { return lives_[static_cast<std::size_t>(at)]; }
  // After the last row the first of the round follows.
  std::int32_t next(std::int32_t at) const { return at + 1 == size() ? setup_ : at + 1; }

  std::int64_t start() const { return start_; }
  std::int64_t clock() const { return clock_; }
  std::int64_t end() const { return start_ + clock_; }
  std::int64_t moment(std::int32_t at) const { return life(at).moment; }
  // When the phase of row `at` is over; of a row of the setup, when the round begins.
  std::int64_t phase_end(std::int32_t at) const;
  // Rows of the round with a place that are alive before their moment.
  std::span<const std::int32_t> early() const { return early_; }
  // What rows of the round use.
  const Cells& round_cells() const { return round_cells_; }

  std::int64_t arena_bytes() const { return edges_.back(); }
  std::int32_t cells() const { return static_cast<std::int32_t>(edges_.size()) - 1; }
  // Where a cell begins; that of `cells()` is the arena's end.
  std::int64_t edge(std::int32_t cell) const { return edges_[static_cast<std::size_t>(cell)]; }
  // The cell that holds a byte, 0 <= offset < arena_bytes().
  std::int32_t cell_of(std::int64_t offset) const;
  // The first cell of the places that begin at `offset`; -1 where none does.
  std::int32_t cell_at(std::int64_t offset) const {
    const auto at = static_cast<std::uint64_t>(offset);
    if (at % kBlock != 0 || at / kBlock >> 32 != 0) return -1;
    const auto key = static_cast<std::uint32_t>(at / kBlock);
    std::size_t slot = home(key);
    while (by_offset_[slot].cell >= 0 && by_offset_[slot].key != key) {
      slot = (slot + 1) & (by_offset_.size() - 1);
    }
    return by_offset_[slot].cell;
  }
  // The first cell that begins at `offset` or above.
  std::int32_t cell_from(std::int64_t offset) const;

  std::span<const CellRange> space(std::int32_t number) const;

  // Rows at which a phase begins, ascending; empty for what is no phase.
  std::span<const std::int32_t> begins(std::int32_t phase) const;
  // Whether any request of the plan has this size.
  bool knows(std::int64_t bytes) const;
  // Rows behind which the job may be when its last `kGram` requests have this mark.
  static constexpr int kGram = 4;
  static std::uint64_t mark(std::int64_t bytes, std::int32_t stream);
  static std::uint64_t join(const std::uint64_t (&marks)[kGram]);
  std::span<const std::pair<std::uint64_t, std::int32_t>> after(std::uint64_t gram) const;

 private:
  void read(const memplan_plan& columns);
  void read_spaces(const memplan_plan& columns);
  void number_streams(const memplan_plan& columns);
  void cut();
  void find_starts();
  void find_shared();
  void find_moments();
  void find_phases();
  void find_grams();

  // Where a place begins, in blocks, and its first cell.
  struct Start {
    std::uint32_t key = 0;
    std::int32_t cell = -1;
  };
  // Fibonacci hashing.
  std::size_t home(std::uint32_t key) const {
    return static_cast<std::size_t>((key * 0x9e3779b97f4a7c15U) >> shift_);
  }

  std::vector<Row> rows_;
  std::vector<Life> lives_;
  std::int32_t setup_ = 0;
  std::int64_t start_ = 0, clock_ = 0;
  std::vector<std::int64_t> sizes_;  // Ascending, each once.
  std::vector<std::int64_t> edges_;
  std::vector<Start> by_offset_;  // Hashed, a power of two long and at most half full.
  int shift_ = 0;
  std::vector<std::int32_t> early_;
  Cells round_cells_{0};
  std::vector<std::pair<std::int64_t, std::int64_t>> ranges_;  // Of all spaces, in order.
  std::vector<std::size_t> space_starts_;
  std::vector<CellRange> space_cells_;
  std::vector<std::vector<std::int32_t>> begins_;  // By phase.
  std::vector<std::int32_t> boundaries_;           // Rows at which any phase begins.
  std::vector<std::pair<std::uint64_t, std::int32_t>> grams_;
};

// As the constructor.
inline std::shared_ptr<const Plan> make_plan(const memplan_plan& columns) {
  return std::make_shared<const Plan>(columns);
}

}  // namespace memplan::planned

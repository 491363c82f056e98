#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace memplan::recompute {

using Row = std::int32_t;
using Value = std::int32_t;

// Row i owns items[start[i]] to items[start[i + 1]], exclusive.
struct Lists {
  std::vector<std::int32_t> start{0};
  std::vector<std::int32_t> items;

  std::span<const std::int32_t> of(std::int32_t row) const {
    const auto index = static_cast<std::size_t>(row);
    const auto begin = static_cast<std::size_t>(start[index]);
    return {items.data() + begin, static_cast<std::size_t>(start[index + 1]) - begin};
  }
  void end_row() { start.push_back(static_cast<std::int32_t>(items.size())); }
};

// Columns of a StepGraph (memplan.types.step_graph). `replayable` is already false for ops outside
// calls.
struct Columns {
  std::span<const std::int64_t> reads_start, reads, writes_start, writes;
  std::span<const double> seconds;
  std::span<const std::uint8_t> replayable;
  std::span<const std::int64_t> bytes, alloc, free;
  std::span<const std::uint8_t> droppable;
  std::int64_t forward_ops = 0;
  // Bytes at each row that belong to no value of these columns.
  std::span<const std::int64_t> background;
  // Passes in flight beside this one, which hold what it keeps; `background` or the base bytes have
  // what that is where nothing is dropped or held.
  std::int64_t others = 0;
};

// All bytes are beside the graph's base bytes.
struct Outcome {
  std::int64_t peak_bytes = 0;
  std::int64_t peak_row = -1;
  double seconds = 0.0;
  std::int64_t replayed_ops = 0;
};

// What dropping and recomputing values does to a step, as docs/recompute.md defines it.
class Model {
 public:
  // Throws std::invalid_argument for columns that contradict each other.
  explicit Model(const Columns& columns);

  std::size_t rows() const { return static_cast<std::size_t>(rows_); }
  std::size_t values() const { return bytes_.size(); }

  // `group` names the group a value is dropped in, in [0, values), or is -1; `held` says which
  // values that die in forward are kept. Fills the most bytes alive at each row (the replays before
  // it included) and the seconds of each group's replay. Throws std::invalid_argument for groups
  // that name values which cannot be dropped or held. One call at a time.
  Outcome evaluate(std::span<const std::int32_t> group, std::span<const std::uint8_t> held,
                   std::span<std::int64_t> row_bytes, std::span<double> group_seconds);

  // The same without looking whether the selection can be.
  Outcome evaluate_unchecked(std::span<const std::int32_t> group,
                             std::span<const std::uint8_t> held,
                             std::span<std::int64_t> row_bytes, std::span<double> group_seconds);

 private:
  struct Replay {
    Row row;
    std::int32_t order;  // Of its first use among all uses in backward.
    std::int32_t group;
  };

  bool available(Value value) const {
    return kept_[static_cast<std::size_t>(value)] != 0 ||
           materialised_at_row_[static_cast<std::size_t>(value)] >= 0;
  }
  void check(std::span<const std::int32_t> group, std::span<const std::uint8_t> held) const;
  void place(std::span<const std::int32_t> group, std::span<const std::uint8_t> held);
  void order_replays(std::span<const std::int32_t> group);
  // Fills closure_ with the forward rows that make a group's members of what is available, latest
  // first; what they begin with lives until now.
  void close(std::span<const Value> members);
  void push_writers(Value value, Row before);
  std::int64_t replay_peak(std::span<const std::int32_t> group, std::int32_t number);

  Row rows_ = 0;
  Row forward_ = 0;
  std::vector<std::int64_t> bytes_;
  std::vector<Row> alloc_, free_;
  std::vector<std::uint8_t> droppable_, recomputable_;
  std::vector<double> seconds_;
  std::vector<std::int64_t> background_;
  std::int64_t others_ = 0;
  Lists needs_;     // Of a forward row: what has to be there before it runs.
  Lists touches_;   // Of a forward row: what it reads or writes.
  Lists outputs_;   // Of a row: the values that it allocates.
  Lists writers_;   // Of a value: forward rows that make it, ascending.
  std::vector<Row> last_forward_, last_backward_;
  std::vector<std::int32_t> first_use_;  // Place among all uses in backward; -1: none.
  std::vector<Row> use_row_;             // Of such a place.

  // Scratch of one evaluation.
  std::vector<Row> end_;  // Of a kept value and of a recomputed one's second life.
  std::vector<std::uint8_t> kept_;
  std::vector<Row> materialised_at_row_;  // -1: not yet.
  Row now_ = 0;
  std::vector<Replay> replays_;
  std::vector<std::vector<Value>> members_;
  std::vector<std::int32_t> live_groups_;
  std::vector<Row> heap_, closure_;
  std::vector<std::uint32_t> row_stamp_;
  std::uint32_t stamp_ = 0;
  std::vector<Row> last_touch_;
  std::vector<std::uint32_t> touch_stamp_;
  std::vector<std::int64_t> delta_, allocated_at_, materialised_at_, replay_top_;
};

}  // namespace memplan::recompute

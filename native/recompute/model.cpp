#include "recompute/model.hpp"

#include <algorithm>
#include <stdexcept>

namespace memplan::recompute {
namespace {

std::size_t at(std::int32_t index) { return static_cast<std::size_t>(index); }

std::int32_t narrow(std::int64_t value) {
  if (value < -1 || value > 0x7fffffff) throw std::invalid_argument("a row is out of range");
  return static_cast<std::int32_t>(value);
}

Lists lists(std::span<const std::int64_t> start, std::span<const std::int64_t> items,
            std::size_t rows, std::size_t values) {
  if (start.size() != rows + 1 || start[0] != 0 ||
      start[rows] != static_cast<std::int64_t>(items.size())) {
    throw std::invalid_argument("reads or writes do not match the rows");
  }
  Lists result;
  for (std::size_t row = 0; row < rows; ++row) {
    if (start[row + 1] < start[row]) throw std::invalid_argument("row starts decrease");
    for (auto i = static_cast<std::size_t>(start[row]); i < static_cast<std::size_t>(start[row + 1]);
         ++i) {
      if (items[i] < 0 || items[i] >= static_cast<std::int64_t>(values)) {
        throw std::invalid_argument("reads or writes name values that do not exist");
      }
      result.items.push_back(static_cast<std::int32_t>(items[i]));
    }
    result.end_row();
  }
  return result;
}

void add_once(Lists& target, std::int32_t item) {
  const auto begin = target.items.begin() + target.start.back();
  if (std::find(begin, target.items.end(), item) == target.items.end()) {
    target.items.push_back(item);
  }
}

}  // namespace

Model::Model(const Columns& columns) {
  const std::size_t rows = columns.seconds.size();
  const std::size_t values = columns.bytes.size();
  if (rows >= 0x7ffffff0 || values >= 0x7ffffff0 || columns.replayable.size() != rows ||
      columns.background.size() != rows ||
      columns.alloc.size() != values || columns.free.size() != values ||
      columns.droppable.size() != values || columns.forward_ops < 0 ||
      columns.forward_ops > static_cast<std::int64_t>(rows)) {
    throw std::invalid_argument("columns differ in length");
  }
  rows_ = static_cast<Row>(rows);
  forward_ = static_cast<Row>(columns.forward_ops);
  bytes_.assign(columns.bytes.begin(), columns.bytes.end());
  background_.assign(columns.background.begin(), columns.background.end());
  others_ = columns.others;
  seconds_.assign(columns.seconds.begin(), columns.seconds.end());
  droppable_.assign(columns.droppable.begin(), columns.droppable.end());
  for (std::size_t value = 0; value < values; ++value) {
    alloc_.push_back(narrow(columns.alloc[value]));
    free_.push_back(std::min(narrow(columns.free[value]), rows_));
    if (alloc_.back() >= rows_ || free_.back() < alloc_.back() || bytes_[value] < 0) {
      throw std::invalid_argument("a value ends before it begins or has negative bytes");
    }
  }
  const Lists reads = lists(columns.reads_start, columns.reads, rows, values);
  const Lists writes = lists(columns.writes_start, columns.writes, rows, values);

  std::vector<std::vector<Value>> outputs(rows);
  for (std::size_t value = 0; value < values; ++value) {
    if (alloc_[value] >= 0) outputs[at(alloc_[value])].push_back(static_cast<Value>(value));
  }
  std::vector<std::vector<Row>> writers(values);
  last_forward_.assign(values, -1);
  last_backward_.assign(values, -1);
  first_use_.assign(values, -1);
  for (Row row = 0; row < rows_; ++row) {
    const bool forward = row < forward_;
    for (const Value value : reads.of(row)) {
      add_once(touches_, value);
      if (forward) add_once(needs_, value);
    }
    for (const Value value : writes.of(row)) {
      add_once(touches_, value);
      if (forward && alloc_[at(value)] != row) add_once(needs_, value);
      if (forward && alloc_[at(value)] >= 0) writers[at(value)].push_back(row);
    }
    for (const Value value : outputs[at(row)]) {
      add_once(touches_, value);
      outputs_.items.push_back(value);
      auto& rows_of = writers[at(value)];
      if (forward && (rows_of.empty() || rows_of.back() != row)) rows_of.push_back(row);
    }
    touches_.end_row();
    needs_.end_row();
    outputs_.end_row();
    for (const Value value : touches_.of(row)) {
      if (forward) {
        last_forward_[at(value)] = row;
      } else {
        last_backward_[at(value)] = row;
        if (first_use_[at(value)] < 0) {
          first_use_[at(value)] = static_cast<std::int32_t>(use_row_.size());
        }
        use_row_.push_back(row);
      }
    }
  }
  recomputable_.assign(values, 0);
  for (std::size_t value = 0; value < values; ++value) {
    bool can = alloc_[value] >= 0 && alloc_[value] < forward_;
    for (const Row row : writers[value]) {
      can = can && columns.replayable[at(row)] != 0;
      writers_.items.push_back(row);
    }
    writers_.end_row();
    recomputable_[value] = can ? 1 : 0;
  }
  end_.resize(values);
  kept_.resize(values);
  materialised_at_row_.resize(values);
  members_.resize(values);
  row_stamp_.assign(rows, 0);
  last_touch_.assign(values, -1);
  touch_stamp_.assign(values, 0);
}

void Model::check(std::span<const std::int32_t> group, std::span<const std::uint8_t> held) const {
  for (std::size_t value = 0; value < values(); ++value) {
    if (group[value] >= static_cast<std::int32_t>(values()) || group[value] < -1) {
      throw std::invalid_argument("a group's number is out of range");
    }
    if (group[value] >= 0 && (droppable_[value] == 0 || recomputable_[value] == 0)) {
      throw std::invalid_argument("a value that cannot be dropped is dropped");
    }
    if (held[value] != 0 && (group[value] >= 0 || alloc_[value] < 0 || alloc_[value] >= forward_)) {
      throw std::invalid_argument("a value that cannot be held is held");
    }
  }
}

// Where each value ends before replays extend it.
void Model::place(std::span<const std::int32_t> group, std::span<const std::uint8_t> held) {
  for (std::size_t value = 0; value < values(); ++value) {
    const bool dropped = group[value] >= 0;
    kept_[value] = !dropped && (recomputable_[value] == 0 || last_backward_[value] >= 0 ||
                                held[value] != 0);
    end_[value] = dropped ? last_backward_[value] + 1 : free_[value];
    materialised_at_row_[value] = -1;
  }
}

void Model::order_replays(std::span<const std::int32_t> group) {
  for (const std::int32_t number : live_groups_) members_[at(number)].clear();
  live_groups_.clear();
  replays_.clear();
  for (std::size_t value = 0; value < values(); ++value) {
    if (group[value] < 0 || first_use_[value] < 0) continue;
    auto& members = members_[at(group[value])];
    if (members.empty()) live_groups_.push_back(group[value]);
    members.push_back(static_cast<Value>(value));
  }
  for (const std::int32_t number : live_groups_) {
    std::int32_t order = 0x7fffffff;
    for (const Value value : members_[at(number)]) order = std::min(order, first_use_[at(value)]);
    replays_.push_back({use_row_[at(order)], order, number});
  }
  std::sort(replays_.begin(), replays_.end(),
            [](const Replay& a, const Replay& b) { return a.order < b.order; });
}

void Model::push_writers(Value value, Row before) {
  for (const Row row : writers_.of(value)) {
    if (row >= before) break;
    if (row_stamp_[at(row)] == stamp_) continue;
    row_stamp_[at(row)] = stamp_;
    heap_.push_back(row);
    std::push_heap(heap_.begin(), heap_.end());
  }
}

void Model::close(std::span<const Value> members) {
  ++stamp_;
  closure_.clear();
  for (const Value value : members) push_writers(value, forward_);
  while (!heap_.empty()) {
    std::pop_heap(heap_.begin(), heap_.end());
    const Row row = heap_.back();
    heap_.pop_back();
    closure_.push_back(row);
    for (const Value value : needs_.of(row)) {
      if (available(value)) {
        end_[at(value)] = std::max(end_[at(value)], now_ + 1);
      } else {
        push_writers(value, row);
      }
    }
  }
}

// The most that one replay holds beside what is alive already: closure_, earliest last.
std::int64_t Model::replay_peak(std::span<const std::int32_t> group, std::int32_t number) {
  for (const Row row : closure_) {  // Latest first: the first touch seen is the last one.
    for (const Value value : touches_.of(row)) {
      if (touch_stamp_[at(value)] == stamp_) continue;
      touch_stamp_[at(value)] = stamp_;
      last_touch_[at(value)] = row;
    }
  }
  std::int64_t now = 0;
  std::int64_t top = 0;
  for (auto it = closure_.rbegin(); it != closure_.rend(); ++it) {
    const Row row = *it;
    for (const Value value : outputs_.of(row)) now += bytes_[at(value)];
    top = std::max(top, now);
    for (const Value value : outputs_.of(row)) {  // A second copy goes at once.
      if (available(value)) now -= bytes_[at(value)];
    }
    for (const Value value : touches_.of(row)) {
      const bool stays = available(value) || (group[at(value)] == number && first_use_[at(value)] >= 0);
      if (!stays && last_touch_[at(value)] == row) now -= bytes_[at(value)];
    }
  }
  return top;
}

Outcome Model::evaluate(std::span<const std::int32_t> group, std::span<const std::uint8_t> held,
                        std::span<std::int64_t> row_bytes, std::span<double> group_seconds) {
  check(group, held);
  return evaluate_unchecked(group, held, row_bytes, group_seconds);
}

Outcome Model::evaluate_unchecked(std::span<const std::int32_t> group,
                                  std::span<const std::uint8_t> held,
                                  std::span<std::int64_t> row_bytes,
                                  std::span<double> group_seconds) {
  place(group, held);
  order_replays(group);
  const auto rows = this->rows();
  allocated_at_.assign(rows, 0);
  materialised_at_.assign(rows, 0);
  replay_top_.assign(rows, 0);
  delta_.assign(rows + 1, 0);
  std::fill(group_seconds.begin(), group_seconds.end(), 0.0);
  Outcome outcome;
  for (const Replay& replay : replays_) {
    now_ = replay.row;
    const auto& members = members_[at(replay.group)];
    close(members);
    for (const Row row : closure_) group_seconds[at(replay.group)] += seconds_[at(row)];
    outcome.seconds += group_seconds[at(replay.group)];
    outcome.replayed_ops += static_cast<std::int64_t>(closure_.size());
    auto& already = materialised_at_[at(now_)];
    replay_top_[at(now_)] =
        std::max(replay_top_[at(now_)], already + replay_peak(group, replay.group));
    for (const Value value : members) {
      materialised_at_row_[at(value)] = now_;
      already += bytes_[at(value)];
    }
  }
  std::int64_t kept_more = 0;  // By a pass, than in the plain run.
  for (std::size_t value = 0; value < values(); ++value) {
    const Row begin = std::max(alloc_[value], 0);
    const bool dropped = group[value] >= 0;
    if (dropped) {
      kept_more -= bytes_[value];
    } else if (free_[value] <= forward_ && end_[value] > forward_) {
      kept_more += bytes_[value];
    }
    if (dropped && materialised_at_row_[value] >= 0) {
      delta_[at(materialised_at_row_[value])] += bytes_[value];
      delta_[at(end_[value])] -= bytes_[value];
    }
    const Row end = dropped ? last_forward_[value] + 1 : end_[value];
    if (end <= begin) continue;
    delta_[at(begin)] += bytes_[value];
    delta_[at(end)] -= bytes_[value];
    if (alloc_[value] >= forward_) allocated_at_[at(begin)] += bytes_[value];
  }
  std::int64_t sum = 0;
  for (std::size_t row = 0; row < rows; ++row) {
    sum += delta_[row];
    const std::int64_t alive = sum + background_[row] + others_ * kept_more;
    const std::int64_t before = alive - allocated_at_[row] - materialised_at_[row];
    row_bytes[row] =
        replay_top_[row] > 0 ? std::max(alive, before + replay_top_[row]) : alive;
    if (outcome.peak_row < 0 || row_bytes[row] > outcome.peak_bytes) {
      outcome.peak_bytes = row_bytes[row];
      outcome.peak_row = static_cast<std::int64_t>(row);
    }
  }
  return outcome;
}

}  // namespace memplan::recompute

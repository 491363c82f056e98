#include "recompute/chain.hpp"

#include <algorithm>
#include <array>

namespace memplan::recompute {
namespace {

// Greatest value of a window [left, right] of positions whose left end only ever moves left, and
// whose right end, by cursor, only ever moves left too. Amortised O(1): a value that a later, equal
// or greater one to its left hides from every window to come is forgotten.
class WindowMaximum {
 public:
  void push_left(std::size_t position, std::int64_t value) {
    while (!records_.empty() && records_.back().value <= value) records_.pop_back();
    records_.push_back({position, value});
  }

  // `right` is at or right of the last position pushed.
  std::int64_t up_to(std::size_t right, std::size_t cursor) {
    std::size_t& at = cursors_[cursor];
    at = std::min(at, records_.size() - 1);
    while (records_[at].position > right) ++at;
    return records_[at].value;
  }

 private:
  struct Record {
    std::size_t position;
    std::int64_t value;
  };
  std::vector<Record> records_;  // From right to left, values falling.
  std::array<std::size_t, 2> cursors_{};
};

// S(i, j) for the two largest j that are still candidates (cursors 0 and 1), as i falls.
class Segments {
 public:
  explicit Segments(const ChainColumns& columns) : c_(columns) {}

  // From here on `start` is i.
  void begin_at(std::size_t start) {
    start_ = start;
    backward_.push_left(start + 1, c_.backward[start]);
    if (start + 1 < c_.keep.size()) {
      forward_.push_left(start + 2, c_.keep[start + 1] + c_.forward[start + 1]);
      replay_.push_left(start + 2, c_.replay[start + 1]);
    }
  }

  std::int64_t held(std::size_t end, std::size_t cursor) {
    const std::size_t row = end - 1;
    const std::int64_t unsaved = c_.unsaved[start_];
    std::int64_t worst = std::max(backward_.up_to(end, cursor) - unsaved, c_.first[row]);
    const auto tail = static_cast<std::size_t>(c_.tail[row]);
    if (tail > start_) {
      std::int64_t replay = c_.end[row];
      if (tail == start_ + 1) {
        replay -= unsaved;
      } else {
        replay = std::max(replay, c_.replay[start_] - unsaved);
        if (tail > start_ + 2) replay = std::max(replay, replay_.up_to(tail - 1, cursor));
      }
      worst = std::max(worst, replay + c_.entry[row]);
    }
    std::int64_t entering = c_.forward[start_];
    if (end > start_ + 1) entering = std::max(entering, forward_.up_to(end, cursor));
    return std::max(worst - c_.kept[start_], entering);
  }

 private:
  const ChainColumns& c_;
  std::size_t start_ = 0;
  WindowMaximum backward_;
  WindowMaximum forward_;
  WindowMaximum replay_;
};

}  // namespace

// Candidates for the next checkpoint j, from the largest (`oldest`) to the newest and smallest: g
// rises along them, since a smaller j with no greater g is at least as good for every i to come. S
// falls along them. So the best is where the two cross: among the first two, once every candidate
// whose successor is beyond the crossing too has been dropped; it stays beyond, S growing as i
// falls.
ChainOptimum least_peak_chain(const ChainColumns& columns) {
  const std::size_t count = columns.keep.size();
  std::vector<std::int64_t> best(count);
  std::vector<std::size_t> after(count);
  std::vector<std::size_t> candidates;
  candidates.reserve(count);
  std::size_t oldest = 0;
  Segments segments(columns);

  for (std::size_t i = count; i-- > 0;) {
    segments.begin_at(i);
    if (i + 1 < count) {
      while (candidates.size() > oldest && best[candidates.back()] >= best[i + 1]) {
        candidates.pop_back();
      }
      candidates.push_back(i + 1);
    }
    std::int64_t cost = columns.last[i];
    std::size_t next = count;
    const auto consider = [&](std::size_t j, std::int64_t held) {
      const std::int64_t worst = std::max(held, best[j]);
      if (worst < cost) {
        cost = worst;
        next = j;
      }
    };
    while (candidates.size() > oldest) {
      const std::size_t j = candidates[oldest];
      const std::int64_t held = segments.held(j, 0);
      if (candidates.size() > oldest + 1) {
        const std::size_t second = candidates[oldest + 1];
        const std::int64_t second_held = segments.held(second, 1);
        if (held >= best[j] && second_held >= best[second]) {
          ++oldest;
          continue;
        }
        consider(second, second_held);
      }
      consider(j, held);
      break;
    }
    best[i] = columns.keep[i] + cost;
    after[i] = next;
  }

  ChainOptimum optimum;
  optimum.peak_bytes = best[0];
  for (std::size_t at = after[0]; at < count; at = after[at]) {
    optimum.checkpoints.push_back(static_cast<std::int64_t>(at));
  }
  return optimum;
}

}  // namespace memplan::recompute

#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "planned/cells.hpp"
#include "planned/guests.hpp"
#include "planned/handover.hpp"
#include "planned/plan.hpp"
#include "planned/sequence.hpp"

namespace memplan::planned {

// How a request got its place.
enum class Kind : std::uint8_t {
  kNone,     // it got none: to the caching allocator
  kPlanned,  // the plan's place
  kDynamic,  // in the reusable space of its window
  kAdopted,  // unforeseen, in what the plan leaves free for as long as it may live
};

struct Place {
  std::int64_t offset = -1;
  std::int32_t cell = -1;  // Of a planned place: its first cell, for `release`.
  Kind kind = Kind::kNone;
};

struct Counters {
  std::int64_t hits = 0, dynamic = 0, adopted = 0, misses = 0, resyncs = 0;
};

// Which bytes of an arena a request gets. Bookkeeping alone: it touches no memory and takes no lock.
// A byte that is in use is never given out, whatever the plan says.
class Arena {
 public:
  // With `in_round` the job is past the plan's setup.
  explicit Arena(std::shared_ptr<const Plan> plan, bool in_round);

  // The next request of the job, of more than 0 bytes. `stream` is numbered in the order of first
  // use, 0 the default one. Places begin at multiples of 512 and take as many bytes.
  Place place(std::int64_t bytes, std::int32_t stream);
  // For the request that `place` has just refused: what is free now, for as long as possible. It
  // may be in the way of planned requests.
  Place squeeze_in(std::int64_t bytes, std::int32_t stream);
  // As `place` in the simplest case: the row that is expected, at its place, while there is one
  // stream. Null in any other; then nothing has been done.
  const Row* expected(std::int64_t bytes, std::int32_t stream) const {
    const Row* row = sequence_.expected(bytes, stream);
    if (row == nullptr || outside_ || row->first < 0 || !handover_.only(stream)) return nullptr;
    return free(row->first, row->last) ? row : nullptr;
  }
  // The job gets what `expected` said.
  void take_expected(const Row& row) {
    now_at_ = sequence_.next();
    sequence_.advance();
    hold(row, row.last);
  }
  // What the stream of the last request must come after, where its bytes were another stream's:
  // slots given to `released_in`, or -1 - s for all work of stream s so far. Distinct.
  const std::vector<std::int32_t>& after() const { return after_; }
  // What `place` gave is free again, with the cell that it said if that is known. Whether its bytes
  // may pass to another stream: then the caller records an event and says in `released_in`, before
  // the next call of `place` or `release`, which slot (>= 0) holds it. Nothing, and false, for an
  // offset that is not in use.
  bool release(std::int64_t offset) { return release(offset, plan_->cell_at(offset)); }
  bool release(std::int64_t offset, std::int32_t cell) {
    if (cell >= 0 && holders_[static_cast<std::size_t>(cell)].last > 0) return release_row(cell);
    return release_guest(offset);
  }
  // The same of a planned place that is in use.
  bool release_row(std::int32_t cell) {
    Holder& held = holders_[static_cast<std::size_t>(cell)];
    const Holder holder = held;
    held.last = 0;
    planned_.remove(cell, holder.last);
    handover_.release(cell, holder.last, holder.stream, true);
    return holder.shared && handover_.several_streams();
  }
  void released_in(std::int64_t offset, std::int32_t slot);
  // The job enters a phase of the plan; -1 for one that is not in it.
  void enter_phase(std::int32_t phase);

  // Whether any of [lower, upper) is in use.
  bool in_use(std::int64_t lower, std::int64_t upper) const;
  // The numbers of the arena's `count` pages, those first that the plan's next rows need last.
  std::vector<std::int32_t> needed_last(std::int64_t page, std::int32_t count) const;
  const Counters& counters() const;

 private:
  // A request at its planned place, by the first of its cells.
  struct Holder {
    std::int32_t last = 0;  // It has the cells up to here; 0: there is none.
    std::int16_t stream = 0;
    bool shared = false;
  };

  bool free(std::int32_t first, std::int32_t last) const {
    return planned_.none(first, last) && (guests_.empty() || guests_.none(first, last));
  }
  // Cells [row.first, last) are free, and now in use.
  void hold(const Row& row, std::int32_t last) {
    planned_.add(row.first, last);
    holders_[static_cast<std::size_t>(row.first)] = {last, row.stream, row.shared};
    ++counters_.hits;
  }
  bool release_guest(std::int64_t offset);

  bool take_row(const Row& row, std::int64_t size, Place& place);
  bool take_space(std::int32_t space, std::int64_t size, std::int32_t stream, Place& place);
  bool adopt(std::int64_t size, std::int32_t stream, std::int64_t until, Place& place);
  Place adopt_or_refuse(std::int64_t size, std::int32_t stream, std::int64_t until);
  void find_gaps(const Cells& taken, CellRange range, std::int64_t size, Guests::Gap& best) const;
  Place invite(const Guests::Gap& gap, std::int64_t size, std::int32_t stream, Kind kind);
  std::int64_t now() const { return plan_->moment(now_at_); }
  std::int64_t end_of(std::int32_t row) const;
  std::int64_t expected_end(std::int64_t bytes) const;
  void block_until(std::int64_t until);
  std::int64_t lap_of_next() const;

  std::shared_ptr<const Plan> plan_;
  Sequence sequence_;
  Cells planned_;                // In use by requests at their planned places.
  std::vector<Holder> holders_;  // By cell.
  Guests guests_;
  Handover handover_;
  Cells blocked_;  // Scratch of `adopt`.
  std::vector<std::int32_t> after_;
  std::int32_t now_at_;  // The row that the last request was, or the first one expected.
  std::int64_t refused_until_ = 0;  // How long the request that was refused may live.
  bool outside_ = false;  // In a phase that the plan does not know.
  mutable Counters counters_;
};

}  // namespace memplan::planned

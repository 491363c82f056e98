#include "planned/arena.hpp"

#include <algorithm>
#include <limits>
#include <utility>

namespace memplan::planned {
namespace {

constexpr std::int64_t kForEver = std::numeric_limits<std::int64_t>::max() / 2;
constexpr int kLookBack = 64;  // Rows among which one of an unforeseen request's size is looked for.

}  // namespace

Arena::Arena(std::shared_ptr<const Plan> plan, bool in_round)
    : plan_(std::move(plan)),
      sequence_(*plan_, in_round),
      planned_(plan_->cells()),
      holders_(static_cast<std::size_t>(plan_->cells())),
      guests_(*plan_),
      handover_(*plan_),
      blocked_(plan_->cells()),
      now_at_(sequence_.next()) {}

Place Arena::place(std::int64_t bytes, std::int32_t stream) {
  after_.clear();
  const std::int64_t size = rounded(bytes);
  if (outside_) return adopt_or_refuse(size, stream, now() + 1);
  const Match match = sequence_.follow(bytes, stream);
  if (match.row < 0) return adopt_or_refuse(size, stream, expected_end(bytes));
  const Row& row = plan_->row(match.row);
  now_at_ = match.row;
  Place place;
  if (row.first >= 0) {
    if (take_row(row, size, place)) return place;
  } else if (row.space < 0) {
    ++counters_.misses;
    refused_until_ = end_of(match.row);
    return place;
  } else if (take_space(row.space, size, stream, place)) {
    return place;
  }
  return adopt_or_refuse(size, stream, end_of(match.row));
}

// The place of a row; a smaller request takes its beginning.
bool Arena::take_row(const Row& row, std::int64_t size, Place& place) {
  const std::int64_t whole = rounded(row.bytes);
  if (size > whole) return false;
  const std::int32_t last = size == whole ? row.last : plan_->cell_from(row.offset + size);
  if (!free(row.first, last)) return false;
  hold(row, last);
  handover_.take(row.first, last, row.stream, after_);
  place = {row.offset, row.first, Kind::kPlanned};
  return true;
}

// Looks for a smaller gap in cells of the range that are not taken.
void Arena::find_gaps(const Cells& taken, CellRange range, std::int64_t size,
                      Guests::Gap& best) const {
  for (std::int32_t first = taken.next_out(range.first); first < range.second;) {
    const std::int32_t last = std::min(taken.next_in(first), range.second);
    guests_.find_gap(first, last, size, best);
    first = taken.next_out(last);
  }
}

// The smallest gap of a dynamic reusable space.
bool Arena::take_space(std::int32_t space, std::int64_t size, std::int32_t stream, Place& place) {
  Guests::Gap best;
  for (const CellRange& range : plan_->space(space)) find_gaps(planned_, range, size, best);
  if (best.offset < 0) return false;
  ++counters_.dynamic;
  place = invite(best, size, stream, Kind::kDynamic);
  return true;
}

// The smallest gap that the plan leaves free until then.
bool Arena::adopt(std::int64_t size, std::int32_t stream, std::int64_t until, Place& place) {
  block_until(until);
  Guests::Gap best;
  find_gaps(blocked_, {0, plan_->cells()}, size, best);
  if (best.offset < 0) return false;
  ++counters_.adopted;
  place = invite(best, size, stream, Kind::kAdopted);
  return true;
}

Place Arena::adopt_or_refuse(std::int64_t size, std::int32_t stream, std::int64_t until) {
  Place place;
  if (adopt(size, stream, until, place)) return place;
  ++counters_.misses;
  refused_until_ = until;
  return place;
}

Place Arena::squeeze_in(std::int64_t bytes, std::int32_t stream) {
  std::int64_t span = std::min(refused_until_ - now(), plan_->clock());
  Place place;
  while (span > 1) {
    span /= 2;
    if (!adopt(rounded(bytes), stream, now() + std::max<std::int64_t>(span, 1), place)) continue;
    --counters_.misses;
    break;
  }
  return place;
}

// Rows that come alive before `until`, and what is in use now. Rows that are past and were left out
// do not count: what they leave free is there to be used.
void Arena::block_until(std::int64_t until) {
  blocked_ = planned_;
  std::int32_t at = sequence_.next();
  const auto block = [&](const Row& row) { blocked_.add(row.first, row.last); };
  for (; at < plan_->setup() && plan_->moment(at) < until; ++at) {
    if (plan_->row(at).first >= 0) block(plan_->row(at));
  }
  if (at < plan_->setup()) return;
  std::int64_t shift = lap_of_next();
  if (until >= plan_->moment(at) + shift + plan_->clock()) {
    blocked_.add(plan_->round_cells());
    return;
  }
  const std::int32_t from = at;
  const std::int64_t first_shift = shift;
  while (plan_->moment(at) + shift < until) {
    if (plan_->row(at).first >= 0) block(plan_->row(at));
    at = plan_->next(at);
    if (at == plan_->setup()) shift += plan_->clock();
  }
  // Of other streams, some are alive before the moment of their request.
  for (const std::int32_t early : plan_->early()) {
    const std::int64_t lap = first_shift + (early < from ? plan_->clock() : 0);
    if (plan_->life(early).lower + lap < until) block(plan_->row(early));
  }
}

Place Arena::invite(const Guests::Gap& gap, std::int64_t size, std::int32_t stream, Kind kind) {
  guests_.add(gap.offset, size, stream);
  handover_.take(plan_->cell_of(gap.offset), plan_->cell_from(gap.offset + size), stream, after_);
  return {gap.offset, -1, kind};
}

// When a row ends, on the clock of `now`.
std::int64_t Arena::end_of(std::int32_t row) const {
  const std::int64_t upper = plan_->life(row).upper;
  return row < plan_->setup() && upper >= plan_->end() ? kForEver : upper;
}

// For how long a request that no row is may live: as a row of its size just before, else for the
// rest of the phase.
std::int64_t Arena::expected_end(std::int64_t bytes) const {
  const std::int32_t next = sequence_.next();
  for (std::int32_t row = next - 1; row >= std::max(next - kLookBack, 0); --row) {
    if (plan_->row(row).bytes == bytes) return std::max(end_of(row), now() + 1);
  }
  return plan_->phase_end(next) + lap_of_next();
}

// The expected row may be the first of the next round.
std::int64_t Arena::lap_of_next() const {
  return plan_->moment(sequence_.next()) < now() ? plan_->clock() : 0;
}

bool Arena::release_guest(std::int64_t offset) {
  Guests::Guest gone;
  if (!guests_.remove(offset, gone)) return false;
  handover_.release(plan_->cell_of(offset), plan_->cell_from(gone.end), gone.stream, false);
  return handover_.several_streams();
}

void Arena::released_in(std::int64_t, std::int32_t slot) { handover_.released_in(slot); }

void Arena::enter_phase(std::int32_t phase) {
  outside_ = phase < 0;
  if (!outside_) sequence_.enter_phase(phase);
}

bool Arena::in_use(std::int64_t lower, std::int64_t upper) const {
  lower = std::max<std::int64_t>(lower, 0);
  upper = std::min(upper, plan_->arena_bytes());
  if (lower >= upper) return false;
  if (!planned_.none(plan_->cell_of(lower), plan_->cell_from(upper))) return true;
  return guests_.touch(lower, upper);
}

std::vector<std::int32_t> Arena::needed_last(std::int64_t page, std::int32_t count) const {
  std::vector<std::int32_t> order;
  order.reserve(static_cast<std::size_t>(count));
  Cells listed(count);
  const auto list = [&](std::int32_t first, std::int32_t last) {
    for (auto each = listed.next_out(first); each < last; each = listed.next_out(each)) {
      listed.add(each, each + 1);
      order.push_back(each);
    }
  };
  std::int32_t at = sequence_.next();
  for (std::int32_t left = plan_->period(); left > 0; --left, at = plan_->next(at)) {
    const Row& row = plan_->row(at);
    if (row.first < 0) continue;
    const std::int64_t end = row.offset + rounded(row.bytes);
    list(static_cast<std::int32_t>(row.offset / page),
         static_cast<std::int32_t>((end - 1) / page) + 1);
  }
  list(0, count);
  std::reverse(order.begin(), order.end());
  return order;
}

const Counters& Arena::counters() const {
  counters_.resyncs = sequence_.resyncs();
  return counters_;
}

}  // namespace memplan::planned

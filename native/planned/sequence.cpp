#include "planned/sequence.hpp"

#include <algorithm>
#include <bit>
#include <cmath>

namespace memplan::planned {
namespace {

// Costs of what an alignment may hold, in quarters of an edit.
constexpr std::int32_t kLeftOut = 4;     // A row that the job does not request.
constexpr std::int32_t kUnforeseen = 4;  // A request that no row is.
constexpr std::int32_t kResized = 3;     // A row in a size that no other row has,
constexpr std::int32_t kAlike = 1;       // by the same factor as the one before,
constexpr std::int32_t kStrange = 7;     // in a size of other rows, or nothing like its own.
constexpr std::int32_t kDynamic = 0;     // A dynamic row in another size.
constexpr std::int32_t kElsewhere = 16;  // To go on at a place that reads like the last requests.
constexpr std::int32_t kBand = 36;       // Hypotheses are dropped this far behind the best.
constexpr std::size_t kMost = 160;       // Hypotheses kept.
constexpr std::size_t kPlaces = 8;       // Places that join at a time.
constexpr int kLost = 10;                // Of the last 32 requests: then they do.
constexpr int kLate = 8;                 // Requests that a phase may be told late.

float ratio_of(std::int64_t bytes, std::int64_t planned) {
  return planned > 0 ? static_cast<float>(bytes) / static_cast<float>(planned) : 0.0F;
}

}  // namespace

Sequence::Sequence(const Plan& plan, bool in_round)
    : plan_(plan), slot_(static_cast<std::size_t>(plan.size()), 0) {
  best_ = {in_round ? plan.setup() : 0, 0};
}

// Of a request that is not the next row, or while it is in doubt which that is.
Match Sequence::align(std::int64_t bytes, std::int32_t stream) {
  if (in_step_) {
    live_.assign(1, best_);
    recent_ = 0;
  }
  in_step_ = false;
  std::rotate(marks_.begin(), marks_.begin() + 1, marks_.end());
  marks_.back() = Plan::mark(bytes, stream);
  leave_out();
  std::swap(live_, fresh_);
  fresh_.clear();
  const bool known = plan_.knows(bytes);
  for (const Hypothesis& one : live_) take(one, bytes, stream, known);
  recent_ <<= 1;
  look_around(bytes, stream);
  settle();
  if (best_.row < 0 || !best_.equal) {
    recent_ |= 1;
    strayed_ = true;
  }
  return {best_.row, best_.equal};
}

// Adds a hypothesis, or betters the one with the same next row.
void Sequence::keep(const Hypothesis& one) {
  auto& slot = slot_[static_cast<std::size_t>(one.next)];
  const auto at = static_cast<std::size_t>(slot);
  if (at < fresh_.size() && fresh_[at].next == one.next) {
    if (one.cost < fresh_[at].cost) fresh_[at] = one;
    return;
  }
  if (fresh_.size() >= kMost) return;
  slot = static_cast<std::int32_t>(fresh_.size());
  fresh_.push_back(one);
}

// Before a request, rows may have been left out: `fresh_` becomes the hypotheses with that.
void Sequence::leave_out() {
  fresh_.clear();
  for (const Hypothesis& one : live_) keep(one);
  for (std::size_t at = 0; at < fresh_.size(); ++at) {
    Hypothesis one = fresh_[at];
    one.cost += kLeftOut;
    one.next = plan_.next(one.next);
    if (one.cost <= kBand) keep(one);
  }
}

void Sequence::take(const Hypothesis& from, std::int64_t bytes, std::int32_t stream, bool known) {
  const Row& row = plan_.row(from.next);
  const std::int32_t behind = plan_.next(from.next);
  keep({from.next, from.cost + kUnforeseen, from.ratio, -1, false});
  if (row.stream != stream) return;
  if (row.bytes == bytes) {
    keep({behind, from.cost, from.ratio, from.next, true});
    return;
  }
  const float ratio = ratio_of(bytes, row.bytes);
  std::int32_t cost = kResized;
  if (row.space >= 0) {
    cost = kDynamic;
  } else if (std::abs(ratio - from.ratio) < 1e-3F * ratio) {
    cost = kAlike;
  } else if (known || ratio < 0.4F || ratio > 2.0F) {
    cost = kStrange;
  }
  keep({behind, from.cost + cost, row.space >= 0 ? from.ratio : ratio, from.next, false});
}

// Where the plan reads like the last requests: places ahead come first.
void Sequence::look_around(std::int64_t bytes, std::int32_t stream) {
  if (std::popcount(recent_) < kLost) return;
  std::uint64_t last[Plan::kGram];
  std::copy(marks_.begin(), marks_.end(), last);
  const auto places = plan_.after(Plan::join(last));
  if (places.empty()) return;
  std::int32_t cheapest = kBand;
  for (const Hypothesis& one : fresh_) cheapest = std::min(cheapest, one.cost);
  auto from = std::lower_bound(places.begin(), places.end(), std::pair{places[0].first, best_.next});
  for (std::size_t count = std::min(places.size(), kPlaces); count > 0; --count, ++from) {
    if (from == places.end()) from = places.begin();
    const std::int32_t next = from->second;
    const std::int32_t row = next == 0 ? plan_.size() - 1 : next - 1;
    // Grams are hashed.
    if (plan_.row(row).bytes != bytes || plan_.row(row).stream != stream) continue;
    keep({next, cheapest + kElsewhere, 1.0F, row, true});
  }
}

// Chooses the best hypothesis and drops those far behind it.
void Sequence::settle() {
  const auto better = [](const Hypothesis& a, const Hypothesis& b) {
    return a.cost != b.cost ? a.cost < b.cost : a.equal > b.equal;
  };
  best_ = *std::min_element(fresh_.begin(), fresh_.end(), better);
  const std::int32_t least = best_.cost;
  live_.clear();
  for (Hypothesis& one : fresh_) {
    one.cost -= least;
    if (one.cost <= kBand) live_.push_back(one);
  }
  best_.cost = 0;
  if (best_.equal && won()) {
    in_step_ = true;
    resyncs_ += strayed_ ? 1 : 0;
    strayed_ = false;
  }
}

// Whether the other hypotheses are no more than what may follow from the best one.
bool Sequence::won() const {
  for (const Hypothesis& one : live_) {
    const std::int32_t away = std::abs(one.next - best_.next);
    const std::int32_t shift = std::min(away, std::abs(plan_.period() - away));
    if (one.cost < std::min(kLeftOut * shift, kBand)) return false;
  }
  return true;
}

// The job may say so a few requests late, and more than once.
void Sequence::enter_phase(std::int32_t phase) {
  const auto begins = plan_.begins(phase);
  if (begins.empty()) return;
  const bool before_round = best_.next < plan_.setup();
  const std::int32_t last = best_.next == 0 ? 0 : best_.next - 1;
  if (in_step_ && (before_round || plan_.life(best_.next).phase == phase ||
                   plan_.life(last).phase == phase)) {
    return;
  }
  auto from = std::lower_bound(begins.begin(), begins.end(), best_.next);
  if (from == begins.end()) from = begins.begin();
  std::int32_t cost = in_step_ ? kLeftOut : 0;
  if (before_round) cost = kElsewhere;
  if (in_step_) live_.assign(1, best_);
  in_step_ = false;
  fresh_.clear();
  for (const Hypothesis& one : live_) keep(one);
  std::int32_t next = *from;
  for (int late = 0; late < kLate; ++late, next = plan_.next(next)) {
    keep({next, cost + (late > 0 ? 1 : 0)});
  }
  std::swap(live_, fresh_);
}

}  // namespace memplan::planned

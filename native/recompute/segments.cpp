#include "recompute/segments.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>

namespace memplan::recompute {
namespace {

constexpr float kNever = std::numeric_limits<float>::infinity();

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

}  // namespace

SegmentTable::SegmentTable(SegmentChain chain) : chain_(std::move(chain)) {
  count_ = chain_.seconds.size();
  width_ = at(chain_.levels) + 1;
  const auto options = static_cast<std::int64_t>(chain_.between.size());
  bool right = chain_.levels >= 0 && chain_.option_start.size() == count_ + 1 &&
               chain_.through.size() == count_ && chain_.need.size() == at(options) &&
               chain_.option_seconds.size() == at(options) &&
               chain_.crossing.size() == (count_ + 1) * (count_ + 1) &&
               chain_.option_start[0] == 0 && chain_.option_start[count_] == options;
  for (std::size_t b = 0; right && b < count_; ++b) {
    right = chain_.option_start[b] < chain_.option_start[b + 1];
  }
  for (const auto* column : {&chain_.between, &chain_.need, &chain_.crossing, &chain_.through}) {
    for (const std::int64_t value : *column) right = right && value >= 0;
  }
  if (!right) throw std::invalid_argument("the chain's columns contradict each other");
  std::size_t rows = 0;
  for (std::size_t start = 0; start <= count_; ++start) {
    offset_.push_back(rows);
    rows += count_ - start + 1;
  }
  table_.assign(rows * width_, kNever);
  for (std::size_t start = count_ + 1; start-- > 0;) {
    std::fill_n(cost(start, start), width_, 0.0F);
    for (std::size_t stop = start + 1; stop <= count_; ++stop) fill(start, stop);
  }
}

void SegmentTable::fill(std::size_t start, std::size_t stop) {
  float* best = cost(start, stop);
  const auto from = [&](std::int64_t least, std::int64_t shift, const float* after, auto&& price) {
    for (std::size_t level = at(std::max(least, shift)); level < width_; ++level) {
      best[level] = std::min(best[level], after[level - at(shift)] + price(level));
    }
  };
  for (std::int64_t i = chain_.option_start[start]; i < chain_.option_start[start + 1]; ++i) {
    const auto seconds = static_cast<float>(chain_.option_seconds[at(i)]);
    from(chain_.need[at(i)], chain_.between[at(i)], cost(start + 1, stop),
         [&](std::size_t) { return seconds; });
  }
  double again = 0.0;
  std::int64_t through = 0;
  for (std::size_t middle = start + 1; middle < stop; ++middle) {
    again += chain_.seconds[middle - 1];
    through = std::max(through, chain_.through[middle - 1]);
    const auto seconds = static_cast<float>(again);
    const float* inside = cost(start, middle);
    from(through, chain_.crossing[start * (count_ + 1) + middle], cost(middle, stop),
         [&](std::size_t level) { return seconds + inside[level]; });
  }
}

SegmentChoice SegmentTable::best(std::int64_t start, std::int64_t stop, std::int64_t level) const {
  if (start < 0 || stop <= start || at(stop) > count_ || level < 0 || level > chain_.levels) {
    throw std::invalid_argument("no such segment");
  }
  SegmentChoice choice;
  choice.cost = std::numeric_limits<double>::infinity();
  for (std::int64_t i = chain_.option_start[at(start)]; i < chain_.option_start[at(start) + 1];
       ++i) {
    if (level < chain_.need[at(i)] || level < chain_.between[at(i)]) continue;
    const double seconds =
        cost(at(start) + 1, at(stop))[at(level - chain_.between[at(i)])] + chain_.option_seconds[at(i)];
    if (seconds < choice.cost) choice = {seconds, i - chain_.option_start[at(start)], -1};
  }
  double again = 0.0;
  std::int64_t through = 0;
  for (std::int64_t middle = start + 1; middle < stop; ++middle) {
    again += chain_.seconds[at(middle) - 1];
    through = std::max(through, chain_.through[at(middle) - 1]);
    const std::int64_t shift = chain_.crossing[at(start) * (count_ + 1) + at(middle)];
    if (level < through || level < shift) continue;
    const double seconds = again + cost(at(middle), at(stop))[at(level - shift)] +
                           cost(at(start), at(middle))[at(level)];
    if (seconds < choice.cost * (1 - 1e-6)) choice = {seconds, -1, middle};
  }
  return choice;
}

}  // namespace memplan::recompute

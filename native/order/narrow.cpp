#include "order/narrow.hpp"

#include <algorithm>

namespace memplan::order {
namespace {

void mark_reached(Op op, const Rows& rows, std::vector<std::uint8_t>& marks) {
  std::vector<Op> queue{op};
  for (std::size_t i = 0; i < queue.size(); ++i) {
    for (const Op other : rows[queue[i]]) {
      if (marks[at(other)] == 0) {
        marks[at(other)] = 1;
        queue.push_back(other);
      }
    }
  }
}

}  // namespace

Narrowing::Narrowing(const Graph& graph, MinCut& cut, const std::atomic<bool>& stopped)
    : graph_(graph), cut_(cut), stopped_(stopped) {}

bool Narrowing::run(Op pivot, std::int64_t budget) {
  before_.clear();
  after_.clear();
  least_ = kInfinite;
  mark_related(pivot);
  do {
    if (!cut_pivot(pivot, budget)) return false;
    if (stopped_.load(std::memory_order_relaxed)) return true;
  } while (force_after(pivot, budget) || force_before(pivot, budget));
  return true;
}

std::int64_t Narrowing::held(Op op, std::span<const Op> before, std::span<const Op> after) {
  return graph_.base + graph_.transient[at(op)] + cut_.solve(op, before, after);
}

bool Narrowing::cut_pivot(Op pivot, std::int64_t budget) {
  const std::int64_t bytes = held(pivot, before_, after_);
  bytes_ = std::min(bytes, least_);
  inside_.assign(at(graph_.ops()), 0);
  for (Op op = 0; op < graph_.ops(); ++op) inside_[at(op)] = cut_.before(op) ? 1 : 0;
  return bytes <= budget;
}

void Narrowing::mark_related(Op pivot) {
  settled_.assign(at(graph_.ops()), 0);
  settled_[at(pivot)] = 1;
  mark_reached(pivot, graph_.before, settled_);
  mark_reached(pivot, graph_.after, settled_);
}

// Operators on the near side of the cut that cannot be before the pivot. What runs after the pivot
// runs after them, too.
bool Narrowing::force_after(Op pivot, std::int64_t budget) {
  std::vector<Op> later(after_);
  later.push_back(pivot);
  const std::size_t known = after_.size();
  for (Op op = 0; op < graph_.ops() && !stopped_.load(std::memory_order_relaxed); ++op) {
    if (settled_[at(op)] != 0 || inside_[at(op)] == 0) continue;
    const std::int64_t bytes = held(op, {}, later);
    if (bytes <= budget) continue;
    least_ = std::min(least_, bytes);
    after_.push_back(op);
    settled_[at(op)] = 1;
    mark_reached(op, graph_.after, settled_);
  }
  return after_.size() > known;
}

bool Narrowing::force_before(Op pivot, std::int64_t budget) {
  std::vector<Op> earlier(before_);
  earlier.push_back(pivot);
  const std::size_t known = before_.size();
  for (Op op = graph_.ops(); op-- > 0 && !stopped_.load(std::memory_order_relaxed);) {
    if (settled_[at(op)] != 0 || inside_[at(op)] != 0) continue;
    const std::int64_t bytes = held(op, earlier, {});
    if (bytes <= budget) continue;
    least_ = std::min(least_, bytes);
    before_.push_back(op);
    settled_[at(op)] = 1;
    mark_reached(op, graph_.before, settled_);
  }
  return before_.size() > known;
}

}  // namespace memplan::order

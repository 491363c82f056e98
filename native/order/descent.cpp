#include "order/descent.hpp"

#include <algorithm>
#include <queue>
#include <unordered_set>
#include <utility>

namespace memplan::order {
namespace {

constexpr std::size_t kMostClimbed = 64;  // operators looked at to find one that can run

}  // namespace

Descent::Descent(const Graph& graph, State& state, Direction direction,
                 const std::atomic<bool>& stopped)
    : graph_(graph),
      state_(state),
      forward_(direction == Direction::kForward),
      stopped_(stopped) {}

bool Descent::run(std::int64_t budget, std::int32_t nodes, std::int32_t climbs,
                  std::vector<Op>& path) {
  climbs_ = climbs;
  ready_.clear();
  for (Op op = 0; op < graph_.ops(); ++op) {
    if (available(op)) ready_.push_back(op);
  }
  while (true) {
    settle(ready_, path, budget, false);
    if (state_.count() == (forward_ ? graph_.ops() : 0)) return true;
    if (stopped_.load(std::memory_order_relaxed) || !escape(budget, nodes, path)) return false;
  }
}

void Descent::step(Op op) { forward_ ? state_.add(op) : state_.remove(op); }

void Descent::undo(Op op) { forward_ ? state_.remove(op) : state_.add(op); }

// Takes every candidate after which no more bytes are alive; what can be taken next joins the
// candidates: what has become available, or, where `connected`, what is near.
void Descent::settle(std::vector<Op>& candidates, std::vector<Op>& path, std::int64_t budget,
                     bool connected) {
  for (bool changed = true; changed;) {
    changed = false;
    for (std::size_t i = 0; i < candidates.size(); ++i) {
      const Op op = candidates[i];
      if (!available(op)) continue;
      const std::int64_t grows = growth(op);
      if (grows > 0 || held(op, grows) > budget) continue;
      step(op);
      path.push_back(op);
      changed = true;
      if (connected) {
        find_near(op, candidates);
      } else {
        for (const Op next : next_of(op)) {
          if (available(next)) candidates.push_back(next);
        }
      }
    }
    std::erase_if(candidates, [this](Op op) { return !available(op); });
  }
}

// Operators that can run and share a value with `op`, come after it, or lead to one that does.
void Descent::find_near(Op op, std::vector<Op>& near) {
  for (const Op next : next_of(op)) climb_to_ready(next, near);
  for (const Value value : graph_.uses[op]) {
    for (const Op user : graph_.users[value]) climb_to_ready(user, near);
  }
}

void Descent::climb_to_ready(Op op, std::vector<Op>& near) {
  stack_.assign(1, op);
  for (std::size_t i = 0; i < stack_.size() && i < kMostClimbed; ++i) {
    const Op other = stack_[i];
    if (passed(other)) continue;
    if (available(other)) {
      if (std::find(near.begin(), near.end(), other) == near.end()) near.push_back(other);
      continue;
    }
    for (const Op needed : needs_of(other)) {
      if (!passed(needed) && std::find(stack_.begin(), stack_.end(), needed) == stack_.end()) {
        stack_.push_back(needed);
      }
    }
  }
}

bool Descent::escape(std::int64_t budget, std::int32_t nodes, std::vector<Op>& path) {
  const std::int64_t start = state_.bytes();
  nodes_.assign(1, {-1, 0, start, 0, 0, 0, ready_.size()});
  steps_.clear();
  near_pool_.assign(ready_.begin(), ready_.end());
  here_ = 0;
  std::unordered_set<std::uint64_t> known{state_.hash()};
  using Entry = std::pair<std::int64_t, std::int32_t>;  // bytes, minus the node: latest first
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> open;
  open.emplace(start, 0);
  std::int32_t found = -1;
  while (!open.empty() && found < 0 && static_cast<std::int32_t>(nodes_.size()) < nodes) {
    const std::int32_t node = -open.top().second;
    open.pop();
    go_to(node);
    const std::vector<Op> near(
        near_pool_.begin() + static_cast<std::ptrdiff_t>(nodes_[at(node)].near_first),
        near_pool_.begin() + static_cast<std::ptrdiff_t>(nodes_[at(node)].near_last));
    for (const Op op : near) {
      if (!available(op) || held(op, growth(op)) > budget) continue;
      const std::size_t first = steps_.size();
      std::vector<Op> next(node == 0 ? std::vector<Op>() : near);
      step(op);
      steps_.push_back(op);
      find_near(op, next);
      settle(next, steps_, budget, true);
      const std::int64_t bytes = state_.bytes();
      const bool complete = state_.count() == (forward_ ? graph_.ops() : 0);
      const bool is_new = known.insert(state_.hash()).second;
      for (std::size_t i = steps_.size(); i > first; --i) undo(steps_[i - 1]);
      if (!is_new) {
        steps_.resize(first);
        continue;
      }
      const auto child = static_cast<std::int32_t>(nodes_.size());
      nodes_.push_back({node, nodes_[at(node)].depth + 1, bytes, first, steps_.size(),
                        near_pool_.size(), near_pool_.size() + next.size()});
      near_pool_.insert(near_pool_.end(), next.begin(), next.end());
      open.emplace(bytes, -child);
      if (bytes <= start || complete) {
        found = child;
        break;
      }
    }
  }
  if (found < 0) {
    if (nodes_.size() == 1 || climbs_ == 0) {
      go_to(0);
      return false;
    }
    --climbs_;
    std::int32_t deepest = 0;
    for (const Node& node : nodes_) deepest = std::max(deepest, node.depth);
    for (std::int32_t node = 1; node < static_cast<std::int32_t>(nodes_.size()); ++node) {
      if (2 * nodes_[at(node)].depth < deepest) continue;
      if (found < 0 || nodes_[at(node)].bytes <= nodes_[at(found)].bytes) found = node;
    }
  }
  go_to(found);
  std::vector<std::int32_t> chain;
  for (std::int32_t node = found; node > 0; node = nodes_[at(node)].parent) chain.push_back(node);
  for (std::size_t i = chain.size(); i > 0; --i) {
    const Node& node = nodes_[at(chain[i - 1])];
    for (std::size_t k = node.first; k < node.last; ++k) {
      path.push_back(steps_[k]);
      for (const Op next : next_of(steps_[k])) {
        if (available(next)) ready_.push_back(next);
      }
    }
  }
  std::erase_if(ready_, [this](Op op) { return !available(op); });
  std::sort(ready_.begin(), ready_.end());
  ready_.erase(std::unique(ready_.begin(), ready_.end()), ready_.end());
  return true;
}

// Leads the state from the node where it is to another.
void Descent::go_to(std::int32_t node) {
  std::vector<std::int32_t> down;
  std::int32_t target = node;
  while (here_ != target) {
    if (nodes_[at(here_)].depth >= nodes_[at(target)].depth) {
      const Node& from = nodes_[at(here_)];
      for (std::size_t i = from.last; i > from.first; --i) undo(steps_[i - 1]);
      here_ = from.parent;
    } else {
      down.push_back(target);
      target = nodes_[at(target)].parent;
    }
  }
  for (std::size_t i = down.size(); i > 0; --i) {
    const Node& to = nodes_[at(down[i - 1])];
    for (std::size_t k = to.first; k < to.last; ++k) step(steps_[k]);
  }
  here_ = node;
}

}  // namespace memplan::order

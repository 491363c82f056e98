#include "order/search.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

#include "order/descent.hpp"
#include "order/state.hpp"

namespace memplan::order {
namespace {

std::vector<std::int64_t> held_by(const Graph& graph, const std::vector<Op>& order) {
  State state(graph);
  std::vector<std::int64_t> held;
  for (const Op op : order) {
    held.push_back(state.bytes() + graph.transient[at(op)]);
    state.add(op);
  }
  return held;
}

}  // namespace

Search::Search(const Graph& graph, const SearchSettings& settings,
               const std::atomic<bool>& stopped)
    : graph_(graph),
      settings_(settings),
      stopped_(stopped),
      cut_(graph),
      narrowing_(graph, cut_, stopped) {}

SearchResult Search::run(std::vector<Op> order) {
  best_.peak = peak_of(graph_, order).bytes;
  best_.order = std::move(order);
  best_.bound = std::max(settings_.floor, graph_.base);
  find_bound();
  for (std::int32_t round = 0; round < settings_.rounds; ++round) {
    const std::int64_t peak = best_.peak;
    for (const int eighths : {8, 4, 2, 6, 0}) {
      const std::int64_t room = best_.peak - 1 - best_.bound;
      if (room < 0 || stopped()) return best_;
      const std::int64_t budget = best_.bound + room / 8 * eighths + room % 8 * eighths / 8;
      const Verdict verdict = probe(budget);
      if (verdict == Verdict::kImpossible && eighths == 8) return best_;
      if (verdict == Verdict::kFound) break;
    }
    if (best_.peak == peak) break;
  }
  return best_;
}

// The least cuts of the operators that hold more in the order than is proved, most held first.
void Search::find_bound() {
  const std::vector<std::int64_t> held = held_by(graph_, best_.order);
  std::vector<std::size_t> places(held.size());
  std::iota(places.begin(), places.end(), std::size_t{0});
  std::stable_sort(places.begin(), places.end(),
                   [&](std::size_t a, std::size_t b) { return held[a] > held[b]; });
  std::vector<std::pair<std::int64_t, Op>> cuts;
  for (const std::size_t place : places) {
    if (held[place] <= best_.bound || stopped()) break;
    const Op op = best_.order[place];
    cuts.emplace_back(graph_.base + graph_.transient[at(op)] + cut_.solve(op), op);
    best_.bound = std::max(best_.bound, cuts.back().first);
  }
  std::stable_sort(cuts.begin(), cuts.end(),
                   [](const auto& a, const auto& b) { return a.first > b.first; });
  cuts.resize(std::min(cuts.size(), at(settings_.pivots)));
  for (const auto& [bytes, op] : cuts) pivots_.push_back(op);
}

Search::Verdict Search::probe(std::int64_t budget) {
  std::vector<std::vector<std::uint8_t>> states;
  for (const Op pivot : pivots_) {
    if (!narrowing_.run(pivot, budget)) {
      best_.bound = std::max(best_.bound, std::min(narrowing_.bytes(), best_.peak));
      return Verdict::kImpossible;
    }
    if (stopped()) return Verdict::kUnknown;
    states.push_back(narrowing_.inside());
  }
  for (const std::vector<std::uint8_t>& inside : states) {
    if (lead(inside, budget) || reroute(inside)) return Verdict::kFound;
  }
  return Verdict::kUnknown;
}

// Looks for an order through the state in which the operators `inside` have run.
bool Search::lead(const std::vector<std::uint8_t>& inside, std::int64_t budget) {
  State middle(graph_);
  for (const Op op : best_.order) {
    if (inside[at(op)] != 0) middle.add(op);
  }
  State state = middle;
  std::vector<Op> later;
  Descent forward(graph_, state, Direction::kForward, stopped_);
  if (!forward.run(budget, settings_.nodes, settings_.climbs, later)) return false;
  std::vector<Op> order;
  Descent backward(graph_, middle, Direction::kBackward, stopped_);
  if (!backward.run(budget, settings_.nodes, settings_.climbs, order)) return false;
  std::reverse(order.begin(), order.end());
  order.insert(order.end(), later.begin(), later.end());
  return take(std::move(order));
}

// The best order, but with the operators `inside` first. What is alive between operators becomes
// no more except where operators change sides.
bool Search::reroute(const std::vector<std::uint8_t>& inside) {
  std::vector<Op> order(best_.order);
  std::stable_partition(order.begin(), order.end(),
                        [&inside](Op op) { return inside[at(op)] != 0; });
  return take(std::move(order));
}

bool Search::take(std::vector<Op> order) {
  const std::int64_t peak = peak_of(graph_, order).bytes;
  if (peak >= best_.peak) return false;
  best_.peak = peak;
  best_.order = std::move(order);
  return true;
}

}  // namespace memplan::order

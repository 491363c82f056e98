#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "order/graph.hpp"
#include "order/min_cut.hpp"
#include "order/narrow.hpp"

namespace memplan::order {

struct SearchSettings {
  std::int64_t floor = 0;    // bytes that are proved already
  std::int32_t nodes = 500;  // sets looked at before one that holds more is taken
  std::int32_t climbs = 50;  // how often one may be taken
  std::int32_t pivots = 4;   // operators through whose cuts orders are led
  std::int32_t rounds = 60;  // of improvements
};

struct SearchResult {
  std::vector<Op> order;
  std::int64_t peak = 0;
  std::int64_t bound = 0;  // no order has a lower peak
};

// Lowers the peak of an order: `docs/order.md`, "The search".
//
// For one budget below the peak after another: either it is proved that no order keeps to it, or an
// order is looked for from a state that every such order could pass, backwards to the start of the
// step and forwards to its end.
class Search {
 public:
  Search(const Graph& graph, const SearchSettings& settings, const std::atomic<bool>& stopped);

  SearchResult run(std::vector<Op> order);

 private:
  enum class Verdict { kImpossible, kFound, kUnknown };

  void find_bound();
  Verdict probe(std::int64_t budget);
  bool lead(const std::vector<std::uint8_t>& inside, std::int64_t budget);
  bool reroute(const std::vector<std::uint8_t>& inside);
  bool take(std::vector<Op> order);
  bool stopped() const { return stopped_.load(std::memory_order_relaxed); }

  const Graph& graph_;
  const SearchSettings settings_;
  const std::atomic<bool>& stopped_;
  MinCut cut_;
  Narrowing narrowing_;
  SearchResult best_;
  std::vector<Op> pivots_;  // those of the largest least cuts
};

}  // namespace memplan::order

// Random graphs through cuts, narrowing and search, checked against the definitions: bytes by going
// over all values, and, where the graph is small, every set of operators that can have run. Larger
// graphs are searched by several threads at once, which a deadline or their caller stops. Built
// with sanitizers it looks for memory errors and races too.
//
//   memplan_order_stress [ROUNDS [SEED]]
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <map>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "order/graph.hpp"
#include "order/min_cut.hpp"
#include "order/narrow.hpp"
#include "order/search.hpp"
#include "order/state.hpp"
#include "order/stress_graphs.hpp"
#include "watch.hpp"

using namespace memplan::order;

namespace {

// The flow brings the whole cut to the end and to operators that run after; on its way there, what
// arrives at an operator leaves it. `earlier` and `later` say where `op` has no choice.
void check_flow(const RandomGraph& graph, const MinCut& cut, Set earlier, Set later, Bytes least) {
  std::vector<Bytes> share(graph.users.size()), rest(graph.bytes.size()),
      back(graph.before.size()), arrives(graph.ops()), leaves(graph.ops());
  cut.flow({share, rest, back});
  Bytes answered = std::accumulate(rest.begin(), rest.end(), Bytes{0});
  for (std::size_t value = 0; value < graph.bytes.size(); ++value) {
    Bytes total = rest[value];
    const std::size_t end = at(graph.users_start[value + 1]);
    for (std::size_t row = at(graph.users_start[value]); row < end; ++row) {
      const auto user = at(graph.users[row]);
      total += share[row];
      arrives[user] += share[row];
      if ((later >> user & 1) != 0) answered += share[row];
    }
    expect(total <= graph.bytes[value], "more than a value's bytes");
    if (graph.maker[value] >= 0) leaves[at(graph.maker[value])] += total;
  }
  for (std::size_t op = 0; op < graph.ops(); ++op) {
    const std::size_t end = at(graph.before_start[op + 1]);
    for (std::size_t row = at(graph.before_start[op]); row < end; ++row) {
      leaves[op] += back[row];
      arrives[at(graph.before[row])] += back[row];
    }
  }
  for (std::size_t op = 0; op < graph.ops(); ++op) {
    const bool open = ((earlier | later) >> op & 1) == 0;
    expect(!open || arrives[op] == leaves[op], "a flow that comes from nowhere");
  }
  for (const std::vector<Bytes>* column : {&share, &rest, &back}) {
    expect(std::all_of(column->begin(), column->end(), [](Bytes b) { return b >= 0; }),
           "a negative flow");
  }
  expect(answered == least, "the flow is not the cut");
}

// A cut is the least over all sets.
void check_cut(Random& random, const RandomGraph& graph, const Everything& all, const Graph& built,
               MinCut& cut, Op op) {
  std::vector<Op> before, after, spare;
  const auto other = static_cast<Op>(below(random, built.ops()));
  if (other != op) std::array{&before, &after, &spare}[at(below(random, 3))]->push_back(other);
  Bytes least = kNever;
  Set always = ~Set{0}, ever = 0;
  all.each_set_before(op, [&](Set ran) {
    if ((set_of(before) & ~ran) != 0 || (set_of(after) & ran) != 0) return;
    least = std::min(least, held(graph, ran, op));
    always &= ran;
    ever |= ran;
  });
  if (least == kNever) return;  // they contradict each other
  const Bytes found = cut.solve(op, before, after);
  expect(built.base + built.transient[at(op)] + found == least, "a cut that is not the least");
  Set inside = 0;
  for (Op one = 0; one < built.ops(); ++one) inside |= (cut.before(one) ? Set{1} : Set{0}) << one;
  expect(all.to[inside] != kNever && held(graph, inside, op) == least, "a set that is not the cut");
  check_flow(graph, cut, always, ~ever, found);
}

// What is forced holds in every order within the budget.
void check_narrowing(const RandomGraph& graph, const Everything& all, Narrowing& narrowing,
                     Op pivot, Bytes budget) {
  if (!narrowing.run(pivot, budget)) {
    expect(all.least() > budget, "a budget refuted that an order keeps to");
    expect(narrowing.bytes() > budget && narrowing.bytes() <= all.least(), "a bound too high");
    return;
  }
  const Set before = set_of(narrowing.before()), after = set_of(narrowing.after());
  all.each_set_before(pivot, [&](Set ran) {
    const Set next = ran | Set{1} << pivot;
    if (std::max({all.to[ran], held(graph, ran, pivot), all.from[next]}) > budget) return;
    expect((before & ~ran) == 0, "forced before a pivot, but not always");
    expect((after & ran) == 0, "forced after a pivot, but not always");
  });
  Set inside = 0;
  for (std::size_t op = 0; op < graph.ops(); ++op) inside |= Set{narrowing.inside()[op]} << op;
  expect(all.to[inside] != kNever && (before & ~inside) == 0 && (after & inside) == 0,
         "a state that cannot be");
}

// The bytes alive after a set, whatever way leads there.
void check_state(Random& random, const RandomGraph& graph, const Graph& built) {
  State state(built);
  Set ran = 0;
  std::map<Set, std::uint64_t> hashes;
  for (int step = 0; step < 40; ++step) {
    const auto op = static_cast<Op>(below(random, built.ops()));
    if (state.can_add(op)) {
      const Bytes grows = state.growth_of_add(op), bytes = state.bytes();
      state.add(op);
      expect(state.bytes() == bytes + grows, "a state grows by what it did not say");
    } else if (state.can_remove(op)) {
      state.remove(op);
    } else {
      continue;
    }
    ran ^= Set{1} << op;
    expect(state.bytes() == held(graph, ran, -1), "bytes of a state");
    expect(hashes.emplace(ran, state.hash()).first->second == state.hash(), "hash of a state");
  }
}

void check_small(Random& random) {
  const RandomGraph graph = random_graph(random, 1 + below(random, 9));
  const Everything all(graph);
  const Graph built(graph.columns());
  const std::vector<Op> start = random_order(random, graph);
  const Bytes first = peak(graph, start);
  expect(peak_of(built, start).bytes == first, "the peak of an order");
  check_state(random, graph, built);
  const std::atomic<bool> stopped = false;
  MinCut cut(built);
  Narrowing narrowing(built, cut, stopped);
  for (Op op = 0; op < built.ops(); ++op) {
    check_cut(random, graph, all, built, cut, op);
    const Bytes room = first - all.least() + 2;
    check_narrowing(graph, all, narrowing, op, all.least() - 1 + below(random, room));
  }
  SearchSettings settings;
  settings.floor = below(random, 2) == 0 ? 0 : all.least();
  if (below(random, 2) == 0) settings.nodes = 1;
  if (below(random, 2) == 0) settings.climbs = 0;
  const SearchResult found = Search(built, settings, stopped).run(start);
  expect(peak(graph, found.order) == found.peak && found.peak <= first, "a peak that is not");
  expect(settings.floor <= found.bound && found.bound <= all.least(), "a bound above an order");
}

// Threads on one graph. What stops them may come at any time.
void check_large(Random& random) {
  const RandomGraph graph = random_graph(random, 20 + below(random, 80));
  const Graph built(graph.columns());
  std::uint8_t cancel = 0;
  std::vector<std::vector<Op>> starts;
  for (int i = 0; i < 3; ++i) starts.push_back(random_order(random, graph));
  std::vector<SearchResult> found(starts.size());
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < starts.size(); ++i) {
    threads.emplace_back([&, i, seconds = 0.02 * static_cast<double>(below(random, 5))] {
      const memplan::Watch watch(seconds, &cancel);
      found[i] = Search(built, SearchSettings(), watch.stopped()).run(starts[i]);
    });
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(below(random, 80)));
  __atomic_store_n(&cancel, std::uint8_t{1}, __ATOMIC_RELAXED);
  for (std::thread& thread : threads) thread.join();
  for (std::size_t i = 0; i < starts.size(); ++i) {
    expect(peak(graph, found[i].order) == found[i].peak, "a peak that is not");
    expect(found[i].peak <= peak(graph, starts[i]), "an order that is worse");
    for (const SearchResult& one : found) expect(one.bound <= found[i].peak, "a bound too high");
  }
}

// Columns that somebody has spoilt are refused, or are another graph.
void check_hostile(Random& random) {
  RandomGraph graph = random_graph(random, 1 + below(random, 12));
  std::vector<std::int64_t>* columns[] = {&graph.scratch, &graph.before_start, &graph.before,
                                          &graph.bytes,   &graph.maker,        &graph.users_start,
                                          &graph.users};
  std::vector<std::int64_t>& column = *columns[below(random, std::ssize(columns))];
  const std::int64_t odd[] = {-1, -2, 0, 1, 1000, kInfinite, kNever, -kNever - 1};
  if (column.empty() || below(random, 4) == 0) {
    column.resize(at(below(random, 20)));
  } else {
    column[at(below(random, std::ssize(column)))] = odd[below(random, std::ssize(odd))];
  }
  try {
    const Graph built(graph.columns());
    const std::atomic<bool> stopped = false;
    std::vector<Op> order(at(built.ops()));
    std::iota(order.begin(), order.end(), Op{0});
    Search(built, SearchSettings(), stopped).run(order);
  } catch (const std::invalid_argument&) {
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 500;
  Random random(argc > 2 ? static_cast<std::uint64_t>(std::atoll(argv[2])) : 1);
  for (int round = 0; round < rounds; ++round) {
    try {
      check_small(random);
      check_hostile(random);
      if (round % 20 == 0) check_large(random);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "round %d: %s\n", round, error.what());
      return 1;
    }
  }
  std::printf("%d rounds\n", rounds);
  return 0;
}

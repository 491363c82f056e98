#pragma once

// Random graphs for the stress program, and what holds of them by definition: no code in common
// with what it checks.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "order/graph.hpp"

namespace memplan::order {

using Random = std::mt19937_64;
using Bytes = std::int64_t;
using Set = std::uint32_t;  // of the operators of a small graph

constexpr Bytes kNever = std::numeric_limits<Bytes>::max();

inline std::int64_t below(Random& random, std::int64_t limit) {
  return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(limit));
}

inline void expect(bool holds, const std::string& what) {
  if (!holds) throw std::logic_error(what);
}

struct RandomGraph {
  std::vector<std::int64_t> scratch, before_start{0}, before, bytes, maker, users_start{0}, users;
  std::vector<std::uint8_t> lasts;
  std::int64_t base = 0;

  Columns columns() const {
    return {scratch, before_start, before, bytes, maker, lasts, users_start, users, base};
  }
  std::size_t ops() const { return scratch.size(); }
  std::span<const std::int64_t> before_of(std::size_t op) const {
    return std::span(before).subspan(at(before_start[op]),
                                     at(before_start[op + 1] - before_start[op]));
  }
  std::span<const std::int64_t> users_of(std::size_t value) const {
    return std::span(users).subspan(at(users_start[value]),
                                    at(users_start[value + 1] - users_start[value]));
  }
};

// Some numbers of [first, end), `most` at most, ascending.
inline std::vector<std::int64_t> some(Random& random, std::int64_t first, std::int64_t end,
                                      int most) {
  std::vector<std::int64_t> found;
  for (std::int64_t left = first < end ? below(random, most + 1) : 0; left > 0; --left) {
    found.push_back(first + below(random, end - first));
  }
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

inline RandomGraph random_graph(Random& random, std::int64_t ops) {
  RandomGraph graph;
  std::vector<std::vector<std::int64_t>> needs;
  const Bytes unit = below(random, 3) == 0 ? kInfinite / (4 * ops * 50) : 1;
  for (std::int64_t op = 0; op < ops; ++op) {
    needs.push_back(some(random, std::max<std::int64_t>(0, op - 20), op, 2));
    graph.scratch.push_back(below(random, 3) == 0 ? unit * below(random, 20) : 0);
  }
  const std::int64_t values = below(random, 2 * ops + 1);
  for (std::int64_t value = 0; value < values; ++value) {
    const std::int64_t maker = below(random, 5) == 0 ? -1 : below(random, ops);
    graph.maker.push_back(maker);
    graph.bytes.push_back(unit * below(random, 50));
    graph.lasts.push_back(below(random, 8) == 0 ? 1 : 0);
    for (const std::int64_t user : some(random, maker + 1, ops, 3)) {
      graph.users.push_back(user);
      if (maker >= 0) needs[at(user)].push_back(maker);
    }
    graph.users_start.push_back(static_cast<std::int64_t>(graph.users.size()));
  }
  for (std::vector<std::int64_t>& row : needs) {
    std::sort(row.begin(), row.end());
    row.erase(std::unique(row.begin(), row.end()), row.end());
    graph.before.insert(graph.before.end(), row.begin(), row.end());
    graph.before_start.push_back(static_cast<std::int64_t>(graph.before.size()));
  }
  graph.base = unit * below(random, 10);
  return graph;
}

inline std::vector<Op> random_order(Random& random, const RandomGraph& graph) {
  std::vector<std::uint8_t> ran(graph.ops(), 0);
  std::vector<Op> order;
  while (order.size() < graph.ops()) {
    const auto op = at(below(random, static_cast<std::int64_t>(graph.ops())));
    const auto needed = graph.before_of(op);
    if (ran[op] != 0 || std::any_of(needed.begin(), needed.end(),
                                    [&](std::int64_t other) { return ran[at(other)] == 0; })) {
      continue;
    }
    ran[op] = 1;
    order.push_back(static_cast<Op>(op));
  }
  return order;
}

// The definitions. `has_run(op)` says which operators have; op -1: none runs.

template <typename HasRun>
Bytes held(const RandomGraph& graph, HasRun has_run, std::int64_t op) {
  Bytes total = graph.base + (op < 0 ? 0 : graph.scratch[at(op)]);
  for (std::size_t value = 0; value < graph.bytes.size(); ++value) {
    const std::int64_t maker = graph.maker[value];
    const auto users = graph.users_of(value);
    const bool there = maker < 0 || has_run(maker);
    const bool wanted =
        graph.lasts[value] != 0 || std::any_of(users.begin(), users.end(), [&](std::int64_t user) {
          return !has_run(user);
        });
    if ((there && wanted) || (op >= 0 && maker == op)) total += graph.bytes[value];
  }
  return total;
}

inline Bytes held(const RandomGraph& graph, Set ran, std::int64_t op) {
  return held(graph, [ran](std::int64_t other) { return (ran >> other & 1) != 0; }, op);
}

// The peak of an order; throws for what is none.
inline Bytes peak(const RandomGraph& graph, const std::vector<Op>& order) {
  std::vector<std::uint8_t> ran(graph.ops(), 0);
  Bytes most = 0;
  expect(order.size() == ran.size(), "an order of another length");
  for (const Op op : order) {
    expect(op >= 0 && at(op) < graph.ops() && ran[at(op)] == 0, "no permutation");
    for (const std::int64_t needed : graph.before_of(at(op))) {
      expect(ran[at(needed)] != 0, "an operator before its time");
    }
    most = std::max(most, held(graph, [&](std::int64_t other) { return ran[at(other)] != 0; }, op));
    ran[at(op)] = 1;
  }
  return most;
}

// Every set of operators that can have run, and the least peaks on the way to it and from it.
struct Everything {
  explicit Everything(const RandomGraph& graph)
      : needs(graph.ops(), 0), to(std::size_t{1} << graph.ops(), kNever), from(to) {
    for (std::size_t op = 0; op < graph.ops(); ++op) {
      for (const std::int64_t other : graph.before_of(op)) needs[op] |= Set{1} << other;
    }
    to.front() = from.back() = 0;
    for (Set ran = 0; ran + 1 < to.size(); ++ran) {
      if (to[ran] == kNever) continue;
      each_next(ran, [&](std::size_t op) {
        Bytes& other = to[ran | Set{1} << op];
        other = std::min(other, std::max(to[ran], held(graph, ran, static_cast<Op>(op))));
      });
    }
    for (auto ran = static_cast<Set>(to.size() - 1); ran-- > 0;) {
      if (to[ran] == kNever) continue;
      each_next(ran, [&](std::size_t op) {
        const Bytes after = from[ran | Set{1} << op];
        from[ran] = std::min(from[ran], std::max(after, held(graph, ran, static_cast<Op>(op))));
      });
    }
  }

  Bytes least() const { return to.back(); }

  // Each operator that can run next.
  template <typename Visit>
  void each_next(Set ran, Visit visit) const {
    for (std::size_t op = 0; op < needs.size(); ++op) {
      if ((ran >> op & 1) == 0 && (needs[op] & ~ran) == 0) visit(op);
    }
  }

  // Each set after which `op` can run.
  template <typename Visit>
  void each_set_before(Op op, Visit visit) const {
    for (Set ran = 0; ran < to.size(); ++ran) {
      if (to[ran] != kNever && (ran >> op & 1) == 0 && (needs[at(op)] & ~ran) == 0) visit(ran);
    }
  }

  std::vector<Set> needs;
  std::vector<Bytes> to, from;
};

inline Set set_of(const std::vector<Op>& ops) {
  return std::accumulate(ops.begin(), ops.end(), Set{0},
                         [](Set set, Op op) { return set | Set{1} << op; });
}

}  // namespace memplan::order

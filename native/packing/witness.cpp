#include "packing/witness.hpp"

#include <algorithm>
#include <numeric>

#include "packing/search.hpp"

namespace memplan::packing {

namespace {

constexpr std::int64_t kDeadEnds = 2'000;  // of one proof
constexpr int kProofs = 400;

struct Rows {
  std::vector<std::int64_t> lower, upper, size, alignment, fixed, twin;

  Rows(const Columns& columns, const std::vector<int>& rows) {
    for (const int row : rows) {
      const auto i = static_cast<std::size_t>(row);
      lower.push_back(columns.lower[i]);
      upper.push_back(columns.upper[i]);
      size.push_back(columns.size[i]);
      alignment.push_back(columns.alignment[i]);
      fixed.push_back(columns.fixed[i]);
      twin.push_back(-1);
    }
  }
};

bool do_not_fit(const Columns& columns, const std::vector<int>& rows, std::int64_t capacity,
                const std::atomic<bool>& stop) {
  if (rows.empty()) return false;
  const Rows some(columns, rows);
  const Problem problem =
      make_problem({some.lower, some.upper, some.size, some.alignment, some.fixed, some.twin});
  const std::int64_t units = capacity / problem.unit;
  if (problem.bound > units) return true;
  Search search(problem, units, 0, stop);
  return search.run({0, 1, 0, 0.0, 0.5}, kDeadEnds) == Outcome::kImpossible;
}

}  // namespace

std::vector<int> fixed_clash(const Problem& problem) {
  std::vector<int> fixed;
  for (std::size_t i = 0; i < problem.items.size(); ++i) {
    if (problem.items[i].fixed >= 0) fixed.push_back(static_cast<int>(i));
  }
  const auto item = [&](int i) -> const Item& {
    return problem.items[static_cast<std::size_t>(i)];
  };
  std::sort(fixed.begin(), fixed.end(),
            [&](int a, int b) { return item(a).first < item(b).first; });
  for (std::size_t i = 0; i < fixed.size(); ++i) {
    const Item& a = item(fixed[i]);
    if (a.fixed % a.alignment != 0) return {fixed[i]};
    for (std::size_t j = i + 1; j < fixed.size() && item(fixed[j]).first < a.last; ++j) {
      const Item& b = item(fixed[j]);
      if (a.fixed < b.fixed + b.size && b.fixed < a.fixed + a.size) return {fixed[i], fixed[j]};
    }
  }
  return {};
}

std::vector<int> overload(const Problem& problem, std::int64_t capacity) {
  for (std::size_t i = 0; i < problem.items.size(); ++i) {
    const Item& item = problem.items[i];
    if (item.fixed >= 0 && item.fixed + item.size > capacity) return {static_cast<int>(i)};
  }
  const auto peak = std::max_element(problem.load.begin(), problem.load.end());
  if (peak == problem.load.end() || *peak <= capacity) return {};
  const auto section = static_cast<int>(peak - problem.load.begin());
  std::vector<int> alive;
  for (std::size_t i = 0; i < problem.items.size(); ++i) {
    const Item& item = problem.items[i];
    if (item.first <= section && section < item.last) alive.push_back(static_cast<int>(i));
  }
  std::stable_sort(alive.begin(), alive.end(), [&](int a, int b) {
    return problem.items[static_cast<std::size_t>(a)].size >
           problem.items[static_cast<std::size_t>(b)].size;
  });
  std::int64_t sum = 0;
  std::vector<int> witness;
  for (const int row : alive) {
    if (sum > capacity) break;
    sum += problem.items[static_cast<std::size_t>(row)].size;
    witness.push_back(row);
  }
  return witness;
}

// Takes away a piece at a time, in order of time, and leaves it away where the rest still does not
// fit; pieces are halved down to single buffers.
std::vector<int> least_witness(const Columns& columns, std::int64_t capacity,
                               const std::atomic<bool>& stop) {
  std::vector<int> rows(columns.lower.size());
  std::iota(rows.begin(), rows.end(), 0);
  std::stable_sort(rows.begin(), rows.end(), [&](int a, int b) {
    return columns.lower[static_cast<std::size_t>(a)] < columns.lower[static_cast<std::size_t>(b)];
  });
  int proofs = 0;
  const auto next = [](std::size_t piece) { return piece == 1 ? 0 : (piece + 1) / 2; };
  for (std::size_t piece = next(rows.size()); piece > 0; piece = next(piece)) {
    for (std::size_t begin = 0; begin < rows.size();) {
      if (stop.load() || ++proofs > kProofs) break;
      std::vector<int> rest(rows.begin(), rows.begin() + static_cast<std::ptrdiff_t>(begin));
      const std::size_t end = std::min(begin + piece, rows.size());
      rest.insert(rest.end(), rows.begin() + static_cast<std::ptrdiff_t>(end), rows.end());
      if (do_not_fit(columns, rest, capacity, stop)) {
        rows = rest;
      } else {
        begin = end;
      }
    }
  }
  std::sort(rows.begin(), rows.end());
  return rows;
}

}  // namespace memplan::packing

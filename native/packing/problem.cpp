#include "packing/problem.hpp"

#include <algorithm>
#include <numeric>
#include <stdexcept>

namespace memplan::packing {

namespace {

// A section begins where a buffer begins. One that begins where others only end holds no more
// than the one before it, so it needs no section of its own.
std::vector<std::int64_t> section_starts(const Columns& columns) {
  std::vector<std::int64_t> starts(columns.lower.begin(), columns.lower.end());
  std::sort(starts.begin(), starts.end());
  starts.erase(std::unique(starts.begin(), starts.end()), starts.end());
  return starts;
}

bool are_twins(const Columns& columns, std::size_t i) {
  const auto other = static_cast<std::size_t>(columns.twin[i]);
  return other < columns.lower.size() && columns.twin[other] == static_cast<std::int64_t>(i) &&
         columns.size[i] == columns.size[other] &&
         columns.alignment[i] == columns.alignment[other] && columns.fixed[i] < 0 &&
         (columns.upper[i] <= columns.lower[other] || columns.upper[other] <= columns.lower[i]);
}

void check(const Columns& columns) {
  const std::size_t n = columns.lower.size();
  if (columns.upper.size() != n || columns.size.size() != n || columns.alignment.size() != n ||
      columns.fixed.size() != n || columns.twin.size() != n) {
    throw std::invalid_argument("columns differ in length");
  }
  for (std::size_t i = 0; i < n; ++i) {
    if (columns.lower[i] >= columns.upper[i]) throw std::invalid_argument("an empty lifetime");
    if (columns.size[i] <= 0) throw std::invalid_argument("a size that is not positive");
    if (columns.alignment[i] <= 0) throw std::invalid_argument("an alignment below 1");
    if (columns.fixed[i] < -1) throw std::invalid_argument("a negative offset");
    if (columns.twin[i] >= 0 && !are_twins(columns, i)) {
      throw std::invalid_argument("a twin that is none");
    }
  }
}

}  // namespace

Problem make_problem(const Columns& columns) {
  check(columns);
  const std::size_t n = columns.lower.size();
  Problem problem;
  problem.unit = 0;
  for (std::size_t i = 0; i < n; ++i) {
    problem.unit = std::gcd(problem.unit, columns.size[i]);
    if (columns.alignment[i] > 1) problem.unit = std::gcd(problem.unit, columns.alignment[i]);
    if (columns.fixed[i] > 0) problem.unit = std::gcd(problem.unit, columns.fixed[i]);
  }
  problem.unit = std::max<std::int64_t>(problem.unit, 1);
  const std::vector<std::int64_t> starts = section_starts(columns);
  problem.sections = static_cast<int>(starts.size());
  const auto section_of = [&](std::int64_t time) {
    return static_cast<int>(std::lower_bound(starts.begin(), starts.end(), time) - starts.begin());
  };
  problem.items.reserve(n);
  problem.load.assign(starts.size() + 1, 0);
  for (std::size_t i = 0; i < n; ++i) {
    Item item;
    item.first = section_of(columns.lower[i]);
    item.last = section_of(columns.upper[i]);
    item.size = columns.size[i] / problem.unit;
    item.alignment = std::max<std::int64_t>(columns.alignment[i] / problem.unit, 1);
    item.fixed = columns.fixed[i] < 0 ? -1 : columns.fixed[i] / problem.unit;
    item.twin = columns.twin[i] < 0 ? -1 : static_cast<int>(columns.twin[i]);
    problem.twins = problem.twins || item.twin >= 0;
    problem.load[static_cast<std::size_t>(item.first)] += item.size;
    problem.load[static_cast<std::size_t>(item.last)] -= item.size;
    if (item.fixed >= 0) problem.bound = std::max(problem.bound, item.fixed + item.size);
    problem.items.push_back(item);
  }
  std::partial_sum(problem.load.begin(), problem.load.end(), problem.load.begin());
  problem.load.pop_back();
  for (const std::int64_t load : problem.load) problem.max_load = std::max(problem.max_load, load);
  problem.bound = std::max(problem.bound, problem.max_load);
  return problem;
}

}  // namespace memplan::packing

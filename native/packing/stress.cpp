// Random problems through the solver, with every option: what it answers is checked against all
// orders of first fit where the problem is small, and for overlaps in any case. Built with
// sanitizers it looks for memory errors too.
//
//   memplan_packing_stress [ROUNDS [SEED]]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <stdexcept>
#include <vector>

#include "packing/solve.hpp"

using namespace memplan::packing;

namespace {

using Random = std::mt19937_64;

struct Rows {
  std::vector<std::int64_t> lower, upper, size, alignment, fixed, twin;

  std::size_t count() const { return lower.size(); }
  Columns columns() const { return {lower, upper, size, alignment, fixed, twin}; }
};

std::int64_t below(Random& random, std::int64_t limit) {
  return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(limit));
}

// Of pairs picked at random, those that are never alive together.
void make_twins(Random& random, Rows& rows) {
  for (int i = 0; i < 40; ++i) {
    const auto a = static_cast<std::size_t>(below(random, static_cast<std::int64_t>(rows.count())));
    const auto b = static_cast<std::size_t>(below(random, static_cast<std::int64_t>(rows.count())));
    const bool apart = rows.upper[a] <= rows.lower[b] || rows.upper[b] <= rows.lower[a];
    if (!apart || rows.fixed[a] >= 0 || rows.fixed[b] >= 0 || rows.twin[a] >= 0 ||
        rows.twin[b] >= 0) {
      continue;
    }
    rows.size[b] = rows.size[a];
    rows.alignment[b] = rows.alignment[a];
    rows.twin[a] = static_cast<std::int64_t>(b);
    rows.twin[b] = static_cast<std::int64_t>(a);
  }
}

Rows random_rows(Random& random, bool small) {
  Rows rows;
  const std::int64_t count = small ? below(random, 7) : 20 + below(random, 200);
  const std::int64_t times = small ? 6 : 4 + below(random, 120);
  const std::int64_t unit = below(random, 2) == 0 ? 1 : 512;
  const bool aligned = below(random, 4) == 0;
  const bool some_fixed = below(random, 4) == 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t lower = below(random, times);
    rows.lower.push_back(lower);
    rows.upper.push_back(lower + 1 + below(random, times - lower));
    rows.size.push_back(unit * (1 + below(random, small ? 6 : 60)));
    rows.alignment.push_back(aligned ? unit * (1 + below(random, 4)) : 1);
    const bool fixed = some_fixed && below(random, 4) == 0;
    rows.fixed.push_back(fixed ? rows.alignment.back() * unit * below(random, 6) : -1);
    rows.twin.push_back(-1);
  }
  if (!small && below(random, 2) == 0) make_twins(random, rows);
  return rows;
}

bool overlap(const Rows& rows, const std::vector<std::int64_t>& offsets, std::size_t i,
             std::size_t j) {
  return rows.lower[i] < rows.upper[j] && rows.lower[j] < rows.upper[i] &&
         offsets[i] < offsets[j] + rows.size[j] && offsets[j] < offsets[i] + rows.size[i];
}

void check_layout(const Rows& rows, const Answer& answer) {
  if (answer.offsets.empty()) {
    if (answer.height >= 0 && rows.count() > 0) throw std::logic_error("a height, no layout");
    return;
  }
  std::int64_t height = 0;
  for (std::size_t i = 0; i < rows.count(); ++i) {
    const std::int64_t offset = answer.offsets[i];
    if (offset < 0 || offset % rows.alignment[i] != 0) throw std::logic_error("offset");
    if (rows.fixed[i] >= 0 && offset != rows.fixed[i]) throw std::logic_error("moved");
    if (rows.twin[i] >= 0 && offset != answer.offsets[static_cast<std::size_t>(rows.twin[i])]) {
      throw std::logic_error("twins apart");
    }
    height = std::max(height, offset + rows.size[i]);
    for (std::size_t j = 0; j < i; ++j) {
      if (overlap(rows, answer.offsets, i, j)) throw std::logic_error("overlap");
    }
  }
  if (height != answer.height) throw std::logic_error("height");
}

// The least height over all orders of first fit, which some order reaches; -1: fixed ones overlap.
std::int64_t least_height(const Rows& rows) {
  std::vector<std::size_t> fixed, order;
  for (std::size_t i = 0; i < rows.count(); ++i) {
    (rows.fixed[i] >= 0 ? fixed : order).push_back(i);
  }
  std::vector<std::int64_t> offsets = rows.fixed;
  for (const std::size_t i : fixed) {
    for (const std::size_t j : fixed) {
      if (i != j && overlap(rows, offsets, i, j)) return -1;
    }
  }
  std::int64_t least = std::numeric_limits<std::int64_t>::max();
  do {
    std::vector<std::size_t> placed = fixed;
    for (const std::size_t i : order) {
      for (offsets[i] = 0;; offsets[i] += rows.alignment[i]) {
        if (std::none_of(placed.begin(), placed.end(),
                         [&](std::size_t j) { return overlap(rows, offsets, i, j); })) {
          break;
        }
      }
      placed.push_back(i);
    }
    std::int64_t height = 0;
    for (std::size_t i = 0; i < rows.count(); ++i) {
      height = std::max(height, offsets[i] + rows.size[i]);
    }
    least = std::min(least, height);
  } while (std::next_permutation(order.begin(), order.end()));
  return least;
}

void check_small(const Rows& rows, Question question) {
  const std::int64_t least = least_height(rows);
  question.capacity = -1;
  question.seconds = 20;
  const Answer best = solve(rows.columns(), question);
  check_layout(rows, best);
  if (least < 0) {
    if (best.status != Status::kInfeasible || best.witness.empty()) throw std::logic_error("clash");
    return;
  }
  if (best.status != Status::kSolved || best.height != least) throw std::logic_error("not least");
  question.capacity = least;
  const Answer fits = solve(rows.columns(), question);
  check_layout(rows, fits);
  if (fits.status != Status::kSolved) throw std::logic_error("does not fit");
  if (least == 0) return;
  question.capacity = least - 1;
  const Answer tight = solve(rows.columns(), question);
  if (tight.status != Status::kInfeasible) throw std::logic_error("fits below the least");
  Rows some;
  for (const int row : tight.witness) {
    const auto i = static_cast<std::size_t>(row);
    some.lower.push_back(rows.lower[i]);
    some.upper.push_back(rows.upper[i]);
    some.size.push_back(rows.size[i]);
    some.alignment.push_back(rows.alignment[i]);
    some.fixed.push_back(rows.fixed[i]);
    some.twin.push_back(-1);
  }
  if (least_height(some) < least) throw std::logic_error("the witness fits");
}

void check_large(const Rows& rows, Random& random, Question question) {
  question.seconds = 0.05;
  const std::uint8_t cancel = 1;
  if (below(random, 4) == 0) question.cancel = &cancel;
  if (below(random, 2) == 0) question.capacity = 512 * below(random, 2000);
  const Answer answer = solve(rows.columns(), question);
  if (answer.status != Status::kInfeasible) check_layout(rows, answer);
  if (answer.status == Status::kSolved && question.capacity >= 0 &&
      answer.height > question.capacity) {
    throw std::logic_error("too high");
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 200;
  Random random(argc > 2 ? static_cast<std::uint64_t>(std::atoll(argv[2])) : 1);
  for (int round = 0; round < rounds; ++round) {
    const bool small = round % 4 != 0;
    const Rows rows = random_rows(random, small);
    Question question;
    question.seed = random();
    question.threads = 1 + static_cast<int>(below(random, 3));
    question.search = small || below(random, 3) != 0;
    question.descend = !question.search || below(random, 3) != 0;
    try {
      if (small) {
        check_small(rows, question);
      } else {
        check_large(rows, random, question);
      }
    } catch (const std::exception& error) {
      std::fprintf(stderr, "round %d: %s\n", round, error.what());
      for (std::size_t i = 0; i < rows.count() && small; ++i) {
        std::fprintf(stderr, "%zu,%lld,%lld,%lld,%lld,%lld\n", i,
                     static_cast<long long>(rows.lower[i]), static_cast<long long>(rows.upper[i]),
                     static_cast<long long>(rows.size[i]),
                     static_cast<long long>(rows.alignment[i]),
                     static_cast<long long>(rows.fixed[i]));
      }
      return 1;
    }
  }
  std::printf("%d rounds\n", rounds);
  return 0;
}

#include "packing/solve.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <numeric>
#include <optional>
#include <thread>

#include "packing/repair.hpp"
#include "packing/search.hpp"
#include "packing/shake.hpp"
#include "packing/skyline.hpp"
#include "packing/witness.hpp"
#include "watch.hpp"

namespace memplan::packing {

namespace {

using Offsets = std::vector<std::int64_t>;

// What an exact search can be given: its tables hold the sections that each buffer lives through,
// and it keeps the floors and the buffers left on every level of its recursion.
constexpr std::int64_t kMostCells = 4'000'000;
constexpr std::size_t kMostBuffers = 2'500;
constexpr std::int64_t kFirstLimit = 200;
constexpr std::int64_t kMostLimit = 1'000'000;
constexpr int kDescentsOfRound = 30;
constexpr int kStaleRounds = 3;
constexpr std::int64_t kRepairWork = 200'000;  // placements

// One call of `task` for each index below `count`, on as many threads.
void together(int count, const std::function<void(int)>& task) {
  std::vector<std::thread> threads;
  for (int i = 1; i < count; ++i) threads.emplace_back(task, i);
  task(0);
  for (std::thread& thread : threads) thread.join();
}

struct DescentWeights {
  double length, size, product;  // weights of a score
  double at_side;                // Skyline::Policy
};

// In the order in which they did best on the steps of real models.
constexpr double kNever = 2.0;
constexpr DescentWeights kDescents[] = {
    {1, 0.1, 0, 0.5}, {0, 0, 1, 0.5},    {1, 0.1, 0, kNever}, {0, 0, 1, kNever},
    {1, 0, 0, 0.5},   {1, 1, 0, kNever}, {0, 1, 0, 0.5},      {0.2, 1, 0, kNever},
};

constexpr Heuristic kHeuristics[] = {
    // length, size, load, noise, power
    {0, 1, 0, 0.2, 0.5}, {1, 0, 0, 0.5, 0.5}, {1, 1, 0, 0.2, 0.5}, {0, 1, 0, 0.5, 0.5},
    {1, 1, 0, 0.5, 0.0}, {1, 0, 0, 0.2, 1.0}, {1, 1, 1, 0.5, 0.0}, {0, 1, 0, 0.2, 1.0},
    {0, 0, 1, 0.5, 0.5}, {1, 0, 0, 0.2, 0.5},
};

class Solver {
 public:
  Solver(const Columns& columns, const Question& question)
      : columns_(columns),
        question_(question),
        problem_(make_problem(columns)),
        watch_(question.seconds, question.cancel),
        threads_(std::max(1, question.threads)),
        bound_(problem_.bound) {
    goal_ = question.capacity < 0 ? -1 : question.capacity / problem_.unit;
    for (const Item& item : problem_.items) cells_ += item.length();
  }

  Answer run() {
    if (const std::optional<Answer> clash = impossible_at_once()) return *clash;
    if (question_.descend) first_descents();
    while (!done() && !watch_.stopped() && round()) {
    }
    return answer();
  }

 private:
  // One after the other: the search at the bound (or at the capacity that is asked for), descents,
  // the search between the bound and the best. Problems too large for the search: repairs, which go
  // on as long as they gain, and descents. False where there is nothing to do.
  bool round() {
    const bool may_search = question_.search && cells_ <= kMostCells &&
                            problem_.items.size() <= kMostBuffers && !problem_.twins;
    const bool may_descend = question_.descend && (goal_ < 0 || goal_ > bound_ || !may_search);
    if (!may_search && !may_descend) return false;
    const int turn = may_search ? round_ % 3 : 3 + round_ % 2;
    if (turn == 3 && height_ >= 0 && repair()) return true;
    ++round_;
    if ((turn == 1 || turn == 4) && may_descend) {
      more_descents();
    } else if (turn == 2 && goal_ < 0 && height_ > bound_ + 1) {
      search_between();
    } else if (turn < 3) {
      search_at_goal();
    }
    return true;
  }

  bool done() const {
    if (impossible_) return true;
    return height_ >= 0 && height_ <= (goal_ >= 0 ? goal_ : low_enough());
  }

  std::int64_t low_enough() const {
    return bound_ + static_cast<std::int64_t>(static_cast<double>(bound_) * question_.within);
  }

  std::optional<Answer> impossible_at_once() const {
    Answer answer;
    answer.bound = bound_ * problem_.unit;
    answer.witness = fixed_clash(problem_);
    if (answer.witness.empty() && goal_ >= 0 && bound_ > goal_) {
      answer.witness = overload(problem_, goal_);
    }
    if (answer.witness.empty()) return std::nullopt;
    answer.status = Status::kInfeasible;
    return answer;
  }

  void offer(std::int64_t height, const Offsets& offsets) {
    if (height < 0 || (height_ >= 0 && height >= height_)) return;
    height_ = height;
    offsets_ = offsets;
  }

  std::vector<double> descent_score(const DescentWeights& weights) const {
    std::int64_t biggest = 1;
    for (const Item& item : problem_.items) biggest = std::max(biggest, item.size);
    std::vector<double> score;
    score.reserve(problem_.items.size());
    for (const Item& item : problem_.items) {
      const double length = static_cast<double>(item.length()) / problem_.sections;
      const double size = static_cast<double>(item.size) / static_cast<double>(biggest);
      score.push_back(weights.length * length + weights.size * size +
                      weights.product * length * size);
    }
    return score;
  }

  std::int64_t descent(int thread, const Skyline::Policy& policy, const std::atomic<bool>& stop,
                    Offsets& offsets) {
    auto& skyline = skylines_[static_cast<std::size_t>(thread)];
    if (!skyline) skyline = std::make_unique<Skyline>(problem_);
    return skyline->fill(policy, stop, offsets);
  }

  // One of every kind, until one reaches the bound. The first one goes to its end however little
  // time there is, so that there always is a layout.
  void first_descents() {
    skylines_.resize(static_cast<std::size_t>(threads_));
    for (const DescentWeights& weights : kDescents) {
      policies_.push_back({descent_score(weights), weights.at_side, false});
      if (problem_.twins) policies_.push_back({policies_.back().score, weights.at_side, true});
    }
    std::vector<std::int64_t> heights(policies_.size(), -1);
    const auto step = static_cast<std::size_t>(threads_);
    const std::atomic<bool> never{false};
    for (std::size_t next = 0;
         next < heights.size() && !done() && (next == 0 || !watch_.stopped()); next += step) {
      const std::size_t count = std::min(step, heights.size() - next);
      std::vector<Offsets> offsets(count);
      together(static_cast<int>(count), [&](int t) {
        const auto i = static_cast<std::size_t>(t);
        const std::atomic<bool>& stop = next + i > 0 ? watch_.stopped() : never;
        heights[next + i] = descent(t, policies_[next + i], stop, offsets[i]);
      });
      for (std::size_t i = 0; i < count; ++i) offer(heights[next + i], offsets[i]);
    }
    by_height_.resize(heights.size());
    std::iota(by_height_.begin(), by_height_.end(), std::size_t{0});
    std::stable_sort(by_height_.begin(), by_height_.end(),
                     [&](std::size_t a, std::size_t b) { return heights[a] < heights[b]; });
  }

  // Each thread has a line of them, begun where the first ones came out lowest; a new one where it
  // got no lower for some rounds.
  void more_descents() {
    while (lines_.size() < static_cast<std::size_t>(threads_)) lines_.push_back(new_line());
    together(threads_, [&](int t) {
      Line& line = lines_[static_cast<std::size_t>(t)];
      Skyline::Policy policy = policies_[line.policy];
      const auto run = [&](const std::vector<double>& score, Offsets& offsets) {
        policy.score = score;
        return descent(t, policy, watch_.stopped(), offsets);
      };
      const std::int64_t before = line.shake.height();
      line.shake.run(run, kDescentsOfRound, goal_ < 0 ? low_enough() : goal_);
      line.stale = line.shake.height() == before ? line.stale + 1 : 0;
    });
    for (Line& line : lines_) {
      offer(line.shake.height(), line.shake.offsets());
      if (line.stale >= kStaleRounds) line = new_line();
    }
  }

  // Each thread goes on from its own layout unless another one is lower. Whether it gained.
  bool repair() {
    while (repairs_.size() < static_cast<std::size_t>(threads_)) {
      repairs_.emplace_back(problem_, policies_, question_.seed * 7919 + repairs_.size());
    }
    const std::int64_t before = height_;
    together(threads_, [&](int t) {
      Repair& repair = repairs_[static_cast<std::size_t>(t)];
      if (repair.height() != before) repair.begin(offsets_);
      repair.run(kRepairWork, goal_ < 0 ? low_enough() : goal_, watch_.stopped());
    });
    for (const Repair& one : repairs_) offer(one.height(), one.offsets());
    return height_ < before;
  }

  struct Line {
    std::size_t policy;  // of policies_
    Shake shake;
    int stale = 0;       // rounds
  };

  Line new_line() {
    const std::size_t number = begun_++;
    const std::size_t policy = by_height_[number % by_height_.size()];
    return {policy, Shake(problem_, policies_[policy].score, question_.seed * 7919 + number)};
  }

  // Searches at one capacity, kept from round to round for what they know to be impossible.
  struct Attempt {
    std::int64_t capacity = -1;
    std::vector<std::unique_ptr<Search>> searches;
    int rounds = 0;
  };

  void search_at_goal() {
    const std::int64_t capacity = goal_ >= 0 ? goal_ : bound_;
    if (at_goal_.capacity != capacity) at_goal_ = {capacity, {}, 0};
    if (search_at(at_goal_) == Outcome::kImpossible) rule_out(capacity);
  }

  void search_between() {
    const std::int64_t capacity = capacity_between();
    if (between_.capacity != capacity) between_ = {capacity, {}, 0};
    const Outcome outcome = search_at(between_);
    if (outcome == Outcome::kImpossible) rule_out(capacity);
    share_ = outcome == Outcome::kLimit ? (1.0 + share_) / 2.0 : 0.5;
    if (share_ > 0.98) share_ = 0.25;
  }

  void rule_out(std::int64_t capacity) {
    bound_ = std::max(bound_, capacity + 1);
    impossible_ = goal_ >= 0;
  }

  std::int64_t capacity_between() const {
    const auto gap = static_cast<double>(height_ - bound_);
    const auto step = static_cast<std::int64_t>(gap * share_);
    return std::clamp<std::int64_t>(bound_ + step, bound_ + 1, height_ - 1);
  }

  Outcome search_at(Attempt& attempt) {
    const auto threads = static_cast<std::size_t>(threads_);
    if (attempt.searches.empty()) {
      for (std::size_t t = 0; t < threads; ++t) {
        attempt.searches.push_back(std::make_unique<Search>(
            problem_, attempt.capacity, question_.seed * 7919 + t, watch_.stopped()));
      }
    }
    double limit = static_cast<double>(kFirstLimit);
    for (int i = 0; i < attempt.rounds / static_cast<int>(std::size(kHeuristics)); ++i) limit *= 2;
    std::vector<Outcome> outcomes(threads, Outcome::kLimit);
    together(threads_, [&](int t) {
      const std::size_t heuristic =
          (static_cast<std::size_t>(attempt.rounds) + static_cast<std::size_t>(t)) %
          std::size(kHeuristics);
      outcomes[static_cast<std::size_t>(t)] = attempt.searches[static_cast<std::size_t>(t)]->run(
          kHeuristics[heuristic], static_cast<std::int64_t>(std::min(limit, 1.0 * kMostLimit)));
    });
    attempt.rounds += threads_;
    for (std::size_t t = 0; t < threads; ++t) {
      if (outcomes[t] == Outcome::kImpossible) return outcomes[t];
      if (outcomes[t] == Outcome::kFound) {
        const Offsets& offsets = attempt.searches[t]->offsets();
        std::int64_t height = 0;
        for (std::size_t i = 0; i < offsets.size(); ++i) {
          height = std::max(height, offsets[i] + problem_.items[i].size);
        }
        offer(height, offsets);
        return outcomes[t];
      }
    }
    return Outcome::kLimit;
  }

  Answer answer() {
    Answer answer;
    answer.bound = (impossible_ ? goal_ + 1 : bound_) * problem_.unit;
    answer.height = height_ < 0 ? -1 : height_ * problem_.unit;
    for (const std::int64_t offset : offsets_) answer.offsets.push_back(offset * problem_.unit);
    if (impossible_) {
      answer.status = Status::kInfeasible;
      answer.witness = least_witness(columns_, question_.capacity, watch_.stopped());
    } else if (done()) {
      answer.status = Status::kSolved;
    }
    return answer;
  }

  const Columns& columns_;
  const Question& question_;
  const Problem problem_;
  Watch watch_;
  const int threads_;
  std::int64_t goal_ = -1;
  std::int64_t cells_ = 0;

  std::int64_t bound_;
  std::int64_t height_ = -1;
  Offsets offsets_;
  bool impossible_ = false;

  std::vector<std::unique_ptr<Skyline>> skylines_;  // by thread
  std::vector<Skyline::Policy> policies_;            // of the first descents
  std::vector<std::size_t> by_height_;              // of them, the lowest outcome first
  std::vector<Line> lines_;  // by thread
  std::size_t begun_ = 0;    // lines, ever
  std::vector<Repair> repairs_;  // by thread
  int round_ = 0;
  Attempt at_goal_;
  Attempt between_;
  double share_ = 0.5;
};

}  // namespace

Answer solve(const Columns& columns, const Question& question) {
  if (columns.lower.empty()) {
    Answer answer;
    answer.status = Status::kSolved;
    answer.height = 0;
    return answer;
  }
  return Solver(columns, question).run();
}

}  // namespace memplan::packing

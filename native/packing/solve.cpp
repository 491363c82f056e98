#include "packing/solve.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <random>
#include <thread>

#include "packing/first_fit.hpp"
#include "packing/search.hpp"
#include "packing/skyline.hpp"
#include "packing/witness.hpp"

namespace memplan::packing {

namespace {

using Offsets = std::vector<std::int64_t>;

// Of an exact search's tables: buffers times the sections that they live through.
constexpr std::int64_t kMostCells = 4'000'000;
constexpr std::int64_t kFirstLimit = 200;
constexpr std::int64_t kMostLimit = 1'000'000;

// Sets a flag at the deadline or when the caller cancels.
class Watch {
 public:
  Watch(double seconds, const std::function<bool()>& cancelled)
      : thread_([this, seconds, &cancelled] { watch(seconds, cancelled); }) {}

  ~Watch() {
    {
      const std::lock_guard lock(mutex_);
      done_ = true;
    }
    wake_.notify_one();
    thread_.join();
  }

  const std::atomic<bool>& stop() const { return stop_; }
  bool stopped() const { return stop_.load(); }
  bool was_cancelled() const { return cancelled_.load(); }

 private:
  void watch(double seconds, const std::function<bool()>& cancelled) {
    using Clock = std::chrono::steady_clock;
    const auto deadline = Clock::now() + std::chrono::duration<double>(std::min(seconds, 1e8));
    std::unique_lock lock(mutex_);
    while (!done_ && !stop_) {
      const auto pause = std::chrono::milliseconds(20);
      wake_.wait_until(lock, std::min<Clock::time_point>(
                                 std::chrono::time_point_cast<Clock::duration>(deadline),
                                 Clock::now() + pause));
      if (cancelled && cancelled()) cancelled_ = true;
      if (cancelled_ || Clock::now() >= deadline) stop_ = true;
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  bool done_ = false;
  std::atomic<bool> stop_{false};
  std::atomic<bool> cancelled_{false};
  std::thread thread_;
};

// One call of `task` for each index below `count`, on as many threads.
void together(int count, const std::function<void(int)>& task) {
  std::vector<std::thread> threads;
  for (int i = 1; i < count; ++i) threads.emplace_back(task, i);
  task(0);
  for (std::thread& thread : threads) thread.join();
}

struct Weights {
  double length, size, product;
};

// In the order in which they did best on the steps of real models.
constexpr Weights kDives[] = {{1, 0.1, 0}, {0, 0, 1}, {1, 0, 0}, {1, 1, 0}, {0, 1, 0}, {0.2, 1, 0}};

constexpr Taste kTastes[] = {
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
        watch_(question.seconds, question.cancelled),
        threads_(std::max(1, question.threads)),
        bound_(problem_.bound) {
    goal_ = question.capacity < 0 ? -1 : question.capacity / problem_.unit;
    for (const Item& item : problem_.items) {
      cells_ += item.length();
      has_fixed_ = has_fixed_ || item.fixed >= 0;
    }
  }

  Answer run() {
    if (const std::optional<Answer> clash = impossible_at_once()) return *clash;
    if (question_.dive) first_dives();
    while (!done() && !watch_.stopped()) {
      const bool may_search = question_.search && cells_ <= kMostCells;
      if (may_search) {
        search_round();
      } else if (question_.dive) {
        noisy_dives();
      } else {
        break;
      }
    }
    return answer();
  }

 private:
  bool done() const {
    if (impossible_) return true;
    return goal_ >= 0 ? height_ >= 0 && height_ <= goal_ : height_ == bound_;
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

  void offer(std::int64_t height, const Offsets& offsets, const char* by) {
    if (height < 0 || (height_ >= 0 && height >= height_)) return;
    height_ = height;
    offsets_ = offsets;
    found_by_ = by;
  }

  std::vector<double> dive_score(const Weights& weights, double noise, std::uint64_t seed) const {
    std::int64_t biggest = 1;
    for (const Item& item : problem_.items) biggest = std::max(biggest, item.size);
    std::mt19937_64 random(seed);
    std::uniform_real_distribution<double> factor(1.0 - noise, 1.0 + noise);
    std::vector<double> score;
    score.reserve(problem_.items.size());
    for (const Item& item : problem_.items) {
      const double length = static_cast<double>(item.length()) / problem_.sections;
      const double size = static_cast<double>(item.size) / static_cast<double>(biggest);
      score.push_back((weights.length * length + weights.size * size +
                       weights.product * length * size) *
                      (noise > 0 ? factor(random) : 1.0));
    }
    return score;
  }

  struct Dive {
    std::int64_t height = -1;
    Offsets offsets;
  };

  Dive dive(int thread, const std::vector<double>& score) {
    Dive dive;
    if (has_fixed_) {
      dive.height = first_fit(problem_, score, watch_.stop(), dive.offsets);
      return dive;
    }
    auto& skyline = skylines_.at(static_cast<std::size_t>(thread));
    if (!skyline) skyline = std::make_unique<Skyline>(problem_);
    dive.height = skyline->fill(score, watch_.stop(), dive.offsets);
    return dive;
  }

  void dives(const std::vector<std::vector<double>>& scores) {
    skylines_.resize(static_cast<std::size_t>(threads_));
    for (std::size_t next = 0; next < scores.size() && !done() && !watch_.stopped();) {
      const std::size_t count =
          std::min(static_cast<std::size_t>(threads_), scores.size() - next);
      std::vector<Dive> found(count);
      together(static_cast<int>(count), [&](int t) {
        found[static_cast<std::size_t>(t)] = dive(t, scores[next + static_cast<std::size_t>(t)]);
      });
      for (const Dive& one : found) offer(one.height, one.offsets, "skyline");
      next += count;
    }
  }

  void first_dives() {
    std::vector<std::vector<double>> scores;
    for (const Weights& weights : kDives) scores.push_back(dive_score(weights, 0, 0));
    dives(scores);
  }

  void noisy_dives() {
    std::vector<std::vector<double>> scores;
    const double noise = 0.02 * (1 + round_ % 16);
    for (const Weights& weights : kDives) {
      scores.push_back(dive_score(weights, noise, question_.seed * 1'000'003 + ++dive_));
    }
    dives(scores);
    ++round_;
  }

  // Searches at one capacity, kept from round to round for what they know to be impossible.
  struct Attempt {
    std::int64_t capacity = -1;
    std::vector<std::unique_ptr<Search>> searches;
    int rounds = 0;
  };

  void search_round() {
    const bool lower = goal_ < 0 && height_ > bound_ + 1 && round_ % 2 == 1;
    Attempt& attempt = lower ? between_ : at_goal_;
    const std::int64_t capacity = goal_ >= 0 ? goal_ : (lower ? capacity_between() : bound_);
    if (attempt.capacity != capacity) attempt = {capacity, {}, 0};
    const Outcome outcome = search_at(attempt);
    ++round_;
    if (outcome == Outcome::kImpossible) {
      if (goal_ >= 0) {
        impossible_ = true;
      } else {
        bound_ = capacity + 1;
        share_ = 0.5;
      }
    } else if (lower) {
      share_ = outcome == Outcome::kFound ? 0.5 : (1.0 + share_) / 2.0;
      if (share_ > 0.98) share_ = 0.25;
    }
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
            problem_, attempt.capacity, question_.seed * 7919 + t, watch_.stop()));
      }
    }
    double limit = static_cast<double>(kFirstLimit);
    for (int i = 0; i < attempt.rounds / static_cast<int>(std::size(kTastes)); ++i) limit *= 2;
    std::vector<Outcome> outcomes(threads, Outcome::kLimit);
    together(threads_, [&](int t) {
      const std::size_t taste =
          (static_cast<std::size_t>(attempt.rounds) + static_cast<std::size_t>(t)) %
          std::size(kTastes);
      outcomes[static_cast<std::size_t>(t)] = attempt.searches[static_cast<std::size_t>(t)]->run(
          kTastes[taste], static_cast<std::int64_t>(std::min(limit, 1.0 * kMostLimit)));
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
        offer(height, offsets, "search");
        return outcomes[t];
      }
    }
    return Outcome::kLimit;
  }

  Answer answer() {
    Answer answer;
    answer.bound = (impossible_ ? goal_ + 1 : bound_) * problem_.unit;
    answer.height = height_ < 0 ? -1 : height_ * problem_.unit;
    answer.found_by = found_by_;
    for (const std::int64_t offset : offsets_) answer.offsets.push_back(offset * problem_.unit);
    if (impossible_) {
      answer.status = Status::kInfeasible;
      answer.witness = least_witness(columns_, question_.capacity, watch_.stop());
    } else if (done()) {
      answer.status = Status::kSolved;
    } else {
      answer.status = watch_.was_cancelled() ? Status::kCancelled : Status::kTimedOut;
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
  bool has_fixed_ = false;

  std::int64_t bound_;
  std::int64_t height_ = -1;
  Offsets offsets_;
  const char* found_by_ = "";
  bool impossible_ = false;

  std::vector<std::unique_ptr<Skyline>> skylines_;
  std::uint64_t dive_ = 0;
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

#pragma once

#include <atomic>
#include <cstdint>
#include <random>
#include <vector>

#include "packing/problem.hpp"
#include "packing/skyline.hpp"

namespace memplan::packing {

// A layout made lower where it is highest: what lives within a window of time around its highest
// buffer is laid out anew, by some descents or the exact search, among all the rest, which stays
// where it is. (Large neighbourhood search, Shaw 1998.)
class Repair {
 public:
  // `policies` are the kinds of descents for the whole problem.
  Repair(const Problem& problem, const std::vector<Skyline::Policy>& policies, std::uint64_t seed);

  // Goes on from here.
  void begin(const std::vector<std::int64_t>& offsets);
  // As many windows as take `work` placements; fewer when nothing is above `goal` or the highest
  // buffer cannot move.
  void run(std::int64_t work, std::int64_t goal, const std::atomic<bool>& stop);

  std::int64_t height() const { return height_; }
  const std::vector<std::int64_t>& offsets() const { return offsets_; }

 private:
  // Part of the problem, its sections counted from `first`.
  struct Window {
    int first;
    int last;
    Problem problem;
    std::vector<int> rows;  // by item; those that stay come behind the others and have none
    std::int64_t height;    // of those that may move
  };

  bool may_move(int item) const;
  int highest() const;
  Window window_around(int item);
  void add_rest(Window& window, std::vector<int>& staying) const;
  int lay_out(const Window& window, std::int64_t goal, const std::atomic<bool>& stop);
  std::int64_t top(int item) const;

  const Problem& problem_;
  const std::vector<Skyline::Policy>& policies_;
  std::mt19937_64 random_;
  std::vector<int> by_first_;
  std::vector<std::size_t> place_;  // by item: where in that
  std::vector<std::int64_t> offsets_;
  std::int64_t height_ = -1;
};

}  // namespace memplan::packing

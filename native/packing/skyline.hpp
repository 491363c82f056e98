#pragma once

#include <atomic>
#include <cstdint>
#include <queue>
#include <vector>

#include "packing/candidates.hpp"
#include "packing/ceilings.hpp"
#include "packing/problem.hpp"
#include "packing/slack_tree.hpp"

namespace memplan::packing {

// One layout without a look back, in O(n log n) or little more: the lowest valley of the skyline is
// filled first, its tightest section before the others, with the buffer of the best score. A fixed
// buffer is placed when the skyline has come up to it; nothing is placed that would reach into it.
class Skyline {
 public:
  explicit Skyline(const Problem& problem);

  // What a dive goes by: the scores of the buffers, and from which part of the best score on one
  // that touches a side of the valley is preferred, because it leaves one gap instead of two.
  struct Manner {
    std::vector<double> score;
    double at_side;  // above 1: never
  };

  // Fills `offsets`; returns the height, -1 when stopped.
  std::int64_t fill(const Manner& manner, const std::atomic<bool>& stop,
                    std::vector<std::int64_t>& offsets);

 private:
  struct Run {
    std::int64_t floor;
    int first;
    int last;
  };
  struct Higher {
    bool operator()(const Run& a, const Run& b) const {
      return a.floor != b.floor ? a.floor > b.floor : a.first > b.first;
    }
  };

  void set_run(int first, int last, std::int64_t floor);
  void join_run(int first, int last, std::int64_t floor);
  void rest(const Run& run, int item, std::int64_t offset);
  void raise(const Run& run, std::int64_t ceiling);
  int choose(const Run& run, double at_side, std::int64_t ceiling) const;
  bool current(const Run& run) const;

  const Problem& problem_;
  Candidates candidates_;
  Ceilings ceilings_;
  SlackTree slack_;
  std::vector<int> run_last_;    // by first section; -1: no run begins here
  std::vector<int> run_first_;   // by last section - 1
  std::vector<std::int64_t> run_floor_;  // by first section
  std::priority_queue<Run, std::vector<Run>, Higher> lowest_;
};

}  // namespace memplan::packing

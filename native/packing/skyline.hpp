#pragma once

#include <atomic>
#include <cstdint>
#include <queue>
#include <vector>

#include "packing/candidates.hpp"
#include "packing/ceilings.hpp"
#include "packing/floor_tree.hpp"
#include "packing/problem.hpp"
#include "packing/slack_tree.hpp"

namespace memplan::packing {

// One layout without a look back, in O(n log n) or little more: the lowest valley of the skyline is
// filled first, its tightest section before the others, with the buffer of the best score. A fixed
// buffer is placed when the skyline has come up to it; nothing is placed that would reach into it.
// When one of two twins is chosen, an offset that is clear for both is fixed for both.
class Skyline {
 public:
  explicit Skyline(const Problem& problem);

  // What a descent goes by: the scores of the buffers, and from which part of the best score on one
  // that touches a side of the valley is preferred, because it leaves one gap instead of two.
  struct Policy {
    std::vector<double> score;
    double at_side;    // above 1: never
    bool twins_first;  // stack them on the ground before all else, what ends latest lowest
  };

  // Fills `offsets`; returns the height, -1 when stopped.
  std::int64_t fill(const Policy& policy, const std::atomic<bool>& stop,
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
  int choose(const Run& run, double at_side, const Candidates::Fits* fits) const;
  std::int64_t common_offset(int item) const;
  void decide(int item);
  bool current(const Run& run) const;

  const Problem& problem_;
  Candidates candidates_;
  Ceilings ceilings_;
  FloorTree floors_;         // kept where there are twins
  std::vector<int> twins_;  // the later one of each two, what ends latest first
  SlackTree slack_;
  std::vector<int> run_last_;    // by first section; -1: no run begins here
  std::vector<int> run_first_;   // by last section - 1
  std::vector<std::int64_t> run_floor_;  // by first section
  std::priority_queue<Run, std::vector<Run>, Higher> lowest_;
};

}  // namespace memplan::packing

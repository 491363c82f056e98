#pragma once

#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

#include "packing/problem.hpp"

namespace memplan::packing {

enum class Outcome { kFound, kImpossible, kLimit };

// How a search orders what it tries; which solutions exist does not depend on it.
struct Heuristic {
  // What scores: the lifetime, the size, the highest load that the buffer meets; each as a part of
  // the most that any has.
  double length;
  double size;
  double load;
  // Scores are multiplied by 1 plus or minus up to this, at random.
  double noise;
  // How strongly sections where dead ends were found are preferred for branching: choices are
  // divided by (1 + dead ends) to this power. Weighted degrees, Boussemart et al. 2004.
  double power;
};

// Exact search for offsets below a capacity: `docs/packing.md`, "The exact search".
//
// Buffers are placed bottom up, each at rest on another or on the ground. The tops of what is
// placed make a skyline; in one of its valleys, one section is chosen, and the branches are: each
// buffer that fits in the valley and covers the section rests there, or none does.
class Search {
 public:
  Search(const Problem& problem, std::int64_t capacity, std::uint64_t seed,
         const std::atomic<bool>& stop);

  // Goes on until `limit` dead ends. What was proved impossible is kept for the next call.
  Outcome run(const Heuristic& heuristic, std::int64_t limit);

  // After kFound: one offset an item.
  const std::vector<std::int64_t>& offsets() const { return offsets_; }
  std::int64_t nodes() const { return nodes_; }

 private:
  struct Choice {
    int section = -1;  // -1: none, what is left falls apart at a wall
    bool may_skip = false;
    int count = 0;
    std::vector<int> items;
  };

  struct Valley {
    int first;
    int last;
    std::int64_t next;         // where it ends: its lower neighbour's floor, or a fixed buffer
    std::int64_t lowest_top;   // of its candidates, where one rests
    int candidates;
  };
  static std::int64_t floor_if_skipped(const Valley& valley);

  Outcome solve(std::vector<int>& items, int first, int last);
  Outcome solve_parts(std::vector<int>& items, int first, int last);
  Outcome branch(std::vector<int>& items, int first, int last, const Choice& choice);
  bool propagate(std::vector<int>& items, int first, int last, Choice& choice);
  bool analyse(const std::vector<int>& items, int first, int last, bool& raised);
  void find_ceilings(const std::vector<int>& items, int first, int last);
  void find_valleys(int first, int last);
  void find_candidates(const std::vector<int>& items);
  bool raise_valleys(bool& raised);
  bool sections_hold(const std::vector<int>& items, int first, int last);
  bool section_holds(int section);
  bool count_failure(int section);
  void choose(Choice& choice) const;
  std::int64_t rest_of(int item) const;
  void place(int item, std::int64_t offset);
  void unplace(int item);
  std::uint64_t state_hash(const std::vector<int>& items, int first, int last) const;
  void order(Choice& choice);
  bool known_impossible(std::uint64_t hash) const { return known_[hash & (known_.size() - 1)] == hash; }
  void remember(std::uint64_t hash) { known_[hash & (known_.size() - 1)] = hash; }
  double random();

  const Problem& problem_;
  const std::int64_t capacity_;
  const std::atomic<bool>& stop_;
  Heuristic heuristic_;
  std::int64_t dead_ends_ = 0;
  std::int64_t limit_ = 0;
  std::int64_t nodes_ = 0;
  std::uint64_t random_state_;

  std::vector<std::int64_t> offsets_;  // -1: not placed
  std::vector<int> same_before_;       // the item before it that differs in nothing, or -1
  std::vector<std::uint64_t> keys_;    // of items, for state_hash
  std::vector<std::uint64_t> known_;   // hashes of states proved impossible, by their low bits

  // Of sections.
  std::vector<std::int64_t> floor_;      // top of what is placed
  std::vector<std::int64_t> remaining_;  // bytes not yet placed
  std::vector<std::uint8_t> closed_;     // nothing more rests on this floor
  std::vector<std::int64_t> ceiling_;    // the lowest fixed buffer above
  bool has_fixed_ = false;
  std::vector<double> weight_;           // 1 + dead ends found there

  // Scratch of one analysis.
  std::vector<Valley> valleys_;
  std::vector<int> valley_of_;           // by section, -1: none
  std::vector<std::int64_t> effective_;  // floor, or what it must at least become
  std::vector<int> count_;               // candidates by section
  std::vector<int> candidates_;
  std::vector<std::int64_t> release_;    // least offset by item
  std::vector<std::uint64_t> signature_;  // by section: what is left to place, from where on
  std::vector<std::uint64_t> held_;       // the last signature with which the section held
  std::vector<std::vector<int>> covering_;  // items by section
  std::vector<std::pair<std::int64_t, std::int64_t>> jobs_;  // release, size
  std::vector<double> score_;
};

}  // namespace memplan::packing

#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "packing/problem.hpp"

namespace memplan::packing {

// The buffers not yet placed, as points (first, last) of a static k-d tree that knows the best
// score below every node: which of those that lie within a window scores best? Buffers with a fixed
// offset are not among them.
//
// Building O(n log n), removal O(log n), a query O(sqrt n) at worst and far less where scores are
// spread, memory O(n).
class Candidates {
 public:
  explicit Candidates(const std::vector<Item>& items);

  // All are there again, with these scores.
  void reset(const std::vector<double>& score);
  void remove(int item);

  // Bounds on both ends of a lifetime, each inclusive.
  struct Window {
    int least_first, most_first, least_last, most_last;
  };

  // The best-scoring item in the window that `fits`; -1: none.
  using Fits = std::function<bool(int)>;
  int best(const Window& window, const Fits* fits = nullptr) const;
  double score(int item) const { return score_[static_cast<std::size_t>(item)]; }

 private:
  struct Node {
    int least_first, most_first, least_last, most_last;
  };

  void build(std::size_t node, std::size_t begin, std::size_t end,
             const std::vector<Item>& items);
  void search(std::size_t node, const Window& window, const Fits* fits, int& best) const;
  bool better(int a, int b) const;

  std::size_t leaves_;          // a power of two
  std::vector<int> order_;      // items by leaf; -1 fills the last ones
  std::vector<Node> nodes_;     // the root is 1, children of i are 2i and 2i + 1
  std::vector<int> top_;        // the best-scoring item below a node; -1: none
  std::vector<std::size_t> leaf_of_;
  std::vector<int> first_;
  std::vector<int> last_;
  std::vector<bool> fixed_;
  std::vector<double> score_;
};

}  // namespace memplan::packing

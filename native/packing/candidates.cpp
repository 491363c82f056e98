#include "packing/candidates.hpp"

#include <algorithm>
#include <limits>
#include <numeric>

namespace memplan::packing {

namespace {

std::size_t at(int index) { return static_cast<std::size_t>(index); }

}  // namespace

Candidates::Candidates(const std::vector<Item>& items) : leaves_(1), order_(items.size()) {
  while (leaves_ < items.size()) leaves_ *= 2;
  std::iota(order_.begin(), order_.end(), 0);
  order_.resize(leaves_, -1);
  nodes_.resize(2 * leaves_);
  top_.assign(2 * leaves_, -1);
  leaf_of_.resize(items.size());
  for (const Item& item : items) {
    first_.push_back(item.first);
    last_.push_back(item.last);
    fixed_.push_back(item.fixed >= 0);
  }
  build(1, 0, leaves_, items);
  for (std::size_t leaf = 0; leaf < leaves_; ++leaf) {
    if (order_[leaf] >= 0) leaf_of_[at(order_[leaf])] = leaf;
  }
}

// Splits by the wider side at the median. Places without an item stay at the end of the order.
void Candidates::build(std::size_t node, std::size_t begin, std::size_t end,
                       const std::vector<Item>& items) {
  constexpr int kMost = std::numeric_limits<int>::max();
  Node box{kMost, -1, kMost, -1};
  for (std::size_t i = begin; i < end && order_[i] >= 0; ++i) {
    const Item& item = items[at(order_[i])];
    box.least_first = std::min(box.least_first, item.first);
    box.most_first = std::max(box.most_first, item.first);
    box.least_last = std::min(box.least_last, item.last);
    box.most_last = std::max(box.most_last, item.last);
  }
  nodes_[node] = box;
  if (end - begin == 1) return;
  const std::size_t middle = (begin + end) / 2;
  std::size_t filled = begin;
  while (filled < end && order_[filled] >= 0) ++filled;
  if (filled > middle) {
    const bool by_first = box.most_first - box.least_first >= box.most_last - box.least_last;
    const auto key = [&](int item) {
      return by_first ? std::pair(items[at(item)].first, item)
                      : std::pair(items[at(item)].last, item);
    };
    std::nth_element(order_.begin() + static_cast<std::ptrdiff_t>(begin),
                     order_.begin() + static_cast<std::ptrdiff_t>(middle),
                     order_.begin() + static_cast<std::ptrdiff_t>(filled),
                     [&](int a, int b) { return key(a) < key(b); });
  }
  build(2 * node, begin, middle, items);
  build(2 * node + 1, middle, end, items);
}

bool Candidates::better(int a, int b) const {
  if (b < 0) return a >= 0;
  if (a < 0) return false;
  if (score_[at(a)] != score_[at(b)]) return score_[at(a)] > score_[at(b)];
  return a < b;
}

void Candidates::reset(const std::vector<double>& score) {
  score_ = score;
  for (std::size_t leaf = 0; leaf < leaves_; ++leaf) {
    const int item = order_[leaf];
    top_[leaves_ + leaf] = item < 0 || fixed_[at(item)] ? -1 : item;
  }
  for (std::size_t node = leaves_ - 1; node > 0; --node) {
    const int left = top_[2 * node];
    const int right = top_[2 * node + 1];
    top_[node] = better(right, left) ? right : left;
  }
}

void Candidates::remove(int item) {
  std::size_t node = leaves_ + leaf_of_[at(item)];
  top_[node] = -1;
  for (node /= 2; node > 0; node /= 2) {
    if (top_[node] != item) break;
    const int left = top_[2 * node];
    const int right = top_[2 * node + 1];
    top_[node] = better(right, left) ? right : left;
  }
}

void Candidates::search(std::size_t node, const Window& window, const Fits* fits,
                        int& best) const {
  const int top = top_[node];
  if (!better(top, best)) return;
  const int first = first_[at(top)];
  const int last = last_[at(top)];
  if (window.least_first <= first && first <= window.most_first && window.least_last <= last &&
      last <= window.most_last && (fits == nullptr || (*fits)(top))) {
    best = top;
    return;
  }
  if (node >= leaves_) return;
  const Node& box = nodes_[node];
  if (box.most_first < window.least_first || box.least_first > window.most_first ||
      box.most_last < window.least_last || box.least_last > window.most_last) {
    return;
  }
  const bool left_first = better(top_[2 * node], top_[2 * node + 1]);
  search(2 * node + (left_first ? 0 : 1), window, fits, best);
  search(2 * node + (left_first ? 1 : 0), window, fits, best);
}

int Candidates::best(const Window& window, const Fits* fits) const {
  int best = -1;
  search(1, window, fits, best);
  return best;
}

}  // namespace memplan::packing

#include "packing/first_fit.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

namespace memplan::packing {

namespace {

std::int64_t lowest_gap(std::vector<std::pair<std::int64_t, std::int64_t>>& taken,
                        const Item& item) {
  std::sort(taken.begin(), taken.end());
  std::int64_t offset = 0;
  for (const auto& [begin, end] : taken) {
    if (offset + item.size <= begin) break;
    offset = std::max(offset, align_up(end, item.alignment));
  }
  return offset;
}

}  // namespace

std::int64_t first_fit(const Problem& problem, const std::vector<double>& score,
                       const std::atomic<bool>& stop, std::vector<std::int64_t>& offsets) {
  const auto& items = problem.items;
  std::vector<std::size_t> order(items.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    const bool fixed_a = items[a].fixed >= 0;
    const bool fixed_b = items[b].fixed >= 0;
    return fixed_a != fixed_b ? fixed_a : score[a] > score[b];
  });
  offsets.assign(items.size(), -1);
  std::vector<std::size_t> placed;
  std::vector<std::pair<std::int64_t, std::int64_t>> taken;
  std::int64_t height = 0;
  for (const std::size_t i : order) {
    if (stop.load(std::memory_order_relaxed)) return -1;
    const Item& item = items[i];
    if (item.fixed >= 0) {
      offsets[i] = item.fixed;
    } else {
      taken.clear();
      for (const std::size_t j : placed) {
        if (items[j].first < item.last && item.first < items[j].last) {
          taken.emplace_back(offsets[j], offsets[j] + items[j].size);
        }
      }
      offsets[i] = lowest_gap(taken, item);
    }
    placed.push_back(i);
    height = std::max(height, offsets[i] + item.size);
  }
  return height;
}

}  // namespace memplan::packing

#include "packing/first_fit.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

namespace memplan::packing {

namespace {

using Range = std::pair<std::int64_t, std::int64_t>;

std::size_t at(int index) { return static_cast<std::size_t>(index); }

// The least multiple of the item's alignment at which it misses all of `taken`.
std::int64_t lowest_gap(const Item& item, std::vector<Range>& taken) {
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
  const std::size_t count = problem.items.size();
  std::vector<int> order(count);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    const bool a_free = problem.items[at(a)].fixed < 0;
    const bool b_free = problem.items[at(b)].fixed < 0;
    return a_free != b_free ? b_free : score[at(a)] > score[at(b)];
  });
  std::vector<int> first(count);
  std::vector<int> last(count);
  std::vector<Range> placed(count);
  std::vector<Range> taken;
  std::int64_t height = 0;
  offsets.assign(count, -1);
  for (std::size_t i = 0; i < count; ++i) {
    if (stop.load(std::memory_order_relaxed)) return -1;
    const Item& item = problem.items[at(order[i])];
    if (item.fixed < 0) {
      taken.clear();
      for (std::size_t j = 0; j < i; ++j) {
        if ((first[j] < item.last) & (item.first < last[j])) taken.push_back(placed[j]);
      }
    }
    const std::int64_t offset = item.fixed >= 0 ? item.fixed : lowest_gap(item, taken);
    first[i] = item.first;
    last[i] = item.last;
    placed[i] = {offset, offset + item.size};
    offsets[at(order[i])] = offset;
    height = std::max(height, offset + item.size);
  }
  return height;
}

}  // namespace memplan::packing

#include "planned/guests.hpp"

#include <algorithm>
#include <iterator>

namespace memplan::planned {

void Guests::add(std::int64_t offset, std::int64_t bytes, std::int32_t stream) {
  const std::int64_t end = offset + bytes;
  guests_[offset] = {end, stream};
  const std::int32_t last = plan_.cell_from(end);
  for (std::int32_t cell = plan_.cell_of(offset); cell < last; ++cell) {
    if (counts_[static_cast<std::size_t>(cell)]++ == 0) cells_.add(cell, cell + 1);
  }
}

bool Guests::remove(std::int64_t offset, Guest& gone) {
  const auto found = guests_.find(offset);
  if (found == guests_.end()) return false;
  gone = found->second;
  guests_.erase(found);
  const std::int32_t last = plan_.cell_from(gone.end);
  for (std::int32_t cell = plan_.cell_of(offset); cell < last; ++cell) {
    if (--counts_[static_cast<std::size_t>(cell)] == 0) cells_.remove(cell, cell + 1);
  }
  return true;
}

bool Guests::touch(std::int64_t lower, std::int64_t upper) const {
  const auto behind = guests_.lower_bound(upper);
  return behind != guests_.begin() && std::prev(behind)->second.end > lower;
}

void Guests::find_gap(std::int32_t first, std::int32_t last, std::int64_t bytes, Gap& best) const {
  std::int64_t from = plan_.edge(first);
  const std::int64_t end = plan_.edge(last);
  if (end - from < bytes) return;
  auto guest = guests_.upper_bound(from);
  if (guest != guests_.begin()) from = std::max(from, std::prev(guest)->second.end);
  while (from < end) {
    const std::int64_t to = guest == guests_.end() ? end : std::min(end, guest->first);
    if (to - from >= bytes && to - from < best.bytes) best = {from, to - from};
    if (to == end) break;
    from = guest->second.end;
    ++guest;
  }
}

}  // namespace memplan::planned

#include "caching/stream_clocks.hpp"

#include <algorithm>

namespace memplan::caching {

void StreamClocks::join(Clock& into, const Clock& from) {
  for (const auto& [stream, mark] : from) {
    std::int64_t& known = into[stream];
    known = std::max(known, mark);
  }
}

StreamClocks::Clock StreamClocks::at_tail(std::int32_t stream) const {
  Clock clock;
  if (const auto waited = waited_.find(stream); waited != waited_.end()) clock = waited->second;
  if (const auto own = tail_.find(stream); own != tail_.end()) clock[stream] = own->second;
  return clock;
}

void StreamClocks::record(std::int32_t stream, std::int64_t event) {
  events_[event] = at_tail(stream);
}

void StreamClocks::wait(std::int32_t stream, std::int64_t event) {
  if (const auto found = events_.find(event); found != events_.end()) {
    join(waited_[stream], found->second);
  }
}

void StreamClocks::synchronize(std::int32_t stream) { join(host_, at_tail(stream)); }

void StreamClocks::synchronize_all() { join(host_, tail_); }

std::int64_t StreamClocks::passed(std::int32_t stream) const {
  const auto found = host_.find(stream);
  return found == host_.end() ? 0 : found->second;
}

}  // namespace memplan::caching

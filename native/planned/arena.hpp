#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "planned/plan.hpp"

namespace memplan::planned {

// How a request got its place.
enum class Kind : std::uint8_t {
  kNone,     // it got none: to the caching allocator
  kPlanned,  // the plan's place
  kDynamic,  // in the reusable space of its window
  kAdopted,  // unforeseen, in what the plan leaves free for as long as it may live
};

struct Place {
  std::int64_t offset = -1;
  Kind kind = Kind::kNone;
  // Streams that used these bytes last and were not that of the request, as slots of their last
  // release: the request's stream must come after them. Empty but where streams change hands.
  std::vector<std::int32_t> after;
};

struct Counters {
  std::int64_t hits = 0, dynamic = 0, adopted = 0, misses = 0, resyncs = 0;
};

// Which bytes of an arena a request gets. Bookkeeping alone: it touches no memory and takes no lock.
class Arena {
 public:
  explicit Arena(std::shared_ptr<const Plan> plan, bool in_round);

  // The next request of the job. `stream` is numbered in the order of first use, 0 the default one.
  Place place(std::int64_t bytes, std::int32_t stream);
  // What `place` gave is free again. Whether its bytes may pass to another stream: then the caller
  // records an event and says in `released_in` which slot holds it.
  bool release(std::int64_t offset);
  void released_in(std::int64_t offset, std::int32_t slot);
  // The job enters a phase of the plan; -1 for one that is not in it.
  void enter_phase(std::int32_t phase);

  // Whether any of [lower, upper) is in use.
  bool in_use(std::int64_t lower, std::int64_t upper) const;
  const Counters& counters() const;
};

}  // namespace memplan::planned

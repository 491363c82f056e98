#pragma once

#include <cstdint>
#include <deque>

#include "planned/c_api.h"

namespace memplan::planned {

// The events of one device, while someone wants them.
class Recorder {
 public:
  bool on() const { return on_; }
  // What was kept and not taken is dropped.
  void start(std::int64_t most);
  void stop() { on_ = false; }

  // Number of a new request.
  std::int64_t next_storage() { return storages_++; }
  void add(std::int32_t kind, std::int64_t bytes, std::int64_t storage, std::int32_t stream);
  std::int64_t take(memplan_event* events, std::int64_t room, std::int64_t* lost);

 private:
  bool on_ = false;
  std::int64_t most_ = 0;
  std::int64_t storages_ = 0;
  std::int64_t lost_ = 0;
  std::deque<memplan_event> events_;
};

}  // namespace memplan::planned

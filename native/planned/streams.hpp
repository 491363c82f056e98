#pragma once

#include <cstdint>
#include <deque>
#include <unordered_map>
#include <vector>

#include "planned/card.hpp"

namespace memplan::planned {

// The streams of a device, numbered in the order of first use; 0 is the default stream.
class Streams {
 public:
  std::int32_t number(Stream handle) {
    if (handle == last_) return last_number_;
    return find(handle);
  }
  // Its number where it has one, else -1.
  std::int32_t known(Stream handle) const {
    const auto found = numbers_.find(handle);
    return found != numbers_.end() ? found->second : -1;
  }
  Stream handle(std::int32_t number) const { return handles_[static_cast<std::size_t>(number)]; }

 private:
  std::int32_t find(Stream handle);

  std::vector<Stream> handles_{nullptr};
  std::unordered_map<Stream, std::int32_t> numbers_{{nullptr, 0}};
  Stream last_ = nullptr;
  std::int32_t last_number_ = 0;
};

// Points in the work of streams. A mark is a number that recurs after 2^31; one that is no longer
// kept has passed.
class Marks {
 public:
  Marks(const Card& card, const Streams& streams) : card_(card), streams_(streams) {}

  // A mark behind all that the stream has been given. One that the driver could not make passes
  // with the next `synchronize` alone.
  std::int32_t make(std::int32_t stream);
  bool passed(std::int32_t mark) const;
  // What the stream is given from now on comes after the mark. False when that cannot be had.
  bool wait(std::int32_t stream, std::int32_t mark);
  // Asks the driver which marks have passed.
  void poll();
  // Waits for all work of the device. False when it cannot be waited for.
  bool synchronize();
  std::int64_t waits() const { return waits_; }

 private:
  struct Mark {
    Event event;  // Null for one that only `synchronize` makes pass.
    bool passed;
  };
  static constexpr std::uint32_t kMask = 0x7fffffff;
  static constexpr std::uint32_t kPollEvery = 32;

  // Its place in `kept_`; beyond its end for a mark that is not kept.
  std::size_t place(std::int32_t mark) const {
    return (static_cast<std::uint32_t>(mark) - first_) & kMask;
  }
  Event new_event();
  void pass(Mark& mark);
  void trim();

  const Card& card_;
  const Streams& streams_;
  std::deque<Mark> kept_;
  std::uint32_t first_ = 0;  // Number of the first of `kept_`.
  std::uint32_t made_ = 0;
  std::vector<std::deque<std::int32_t>> by_stream_;  // Marks in order, those with events.
  std::vector<Event> spare_;
  std::int64_t waits_ = 0;
};

}  // namespace memplan::planned

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "planned/card.hpp"

namespace memplan::planned {

// Memory of a device comes as a segment, which has an address, or as a page, of an arena or of an
// expandable segment, which has a handle and is mapped where it is needed.
enum class Form : std::uint8_t { kSegment, kSegmentPage, kArenaPage };

// What hands out memory of one device. Adaptors stand on another resource and add one thing to it.
// No resource locks: the device that owns it does.
class Resource {
 public:
  virtual ~Resource() = default;
  // An address or a handle; 0 when there is no memory.
  virtual std::uint64_t take(Form form, std::int64_t bytes) = 0;
  virtual void give_back(Form form, std::uint64_t what, std::int64_t bytes) = 0;
};

// The device itself.
class DeviceMemory final : public Resource {
 public:
  DeviceMemory(const Card& card, const AllocationProperties& properties)
      : card_(card), properties_(properties) {}

  std::uint64_t take(Form form, std::int64_t bytes) override {
    const Current current(card_);
    const auto size = static_cast<std::size_t>(bytes);
    unsigned long long what = 0;
    last_ = form == Form::kSegment ? card_.driver.mem_alloc(&what, size)
                                   : card_.driver.create(&what, size, &properties_, 0);
    return last_ == kSuccess ? what : 0;
  }

  void give_back(Form form, std::uint64_t what, std::int64_t) override {
    const Current current(card_);
    // A failure means that the context is gone, and the memory with it.
    form == Form::kSegment ? card_.driver.mem_free(what) : card_.driver.release(what);
  }

  // What the driver said last.
  Result last() const { return last_; }

 private:
  const Card& card_;
  const AllocationProperties properties_;
  Result last_ = kSuccess;
};

// No more than so many bytes at once.
class Limit final : public Resource {
 public:
  explicit Limit(Resource& upstream) : upstream_(upstream) {}

  void set(std::int64_t bytes) { limit_ = bytes < 0 ? kNone : bytes; }

  std::uint64_t take(Form form, std::int64_t bytes) override {
    if (bytes > limit_ - std::min(used_, limit_)) return 0;
    const std::uint64_t what = upstream_.take(form, bytes);
    if (what != 0) used_ += bytes;
    return what;
  }

  void give_back(Form form, std::uint64_t what, std::int64_t bytes) override {
    used_ -= bytes;
    upstream_.give_back(form, what, bytes);
  }

 private:
  static constexpr std::int64_t kNone = std::numeric_limits<std::int64_t>::max();

  Resource& upstream_;
  std::int64_t limit_ = kNone;
  std::int64_t used_ = 0;
};

// Fails once, when asked to: what cannot be tested otherwise is not safe.
class Failure final : public Resource {
 public:
  explicit Failure(Resource& upstream) : upstream_(upstream) {}

  // The n-th `take` from now on; 0 for none.
  void set(std::int64_t n) { left_ = n; }

  std::uint64_t take(Form form, std::int64_t bytes) override {
    if (left_ > 0 && --left_ == 0) return 0;
    return upstream_.take(form, bytes);
  }

  void give_back(Form form, std::uint64_t what, std::int64_t bytes) override {
    upstream_.give_back(form, what, bytes);
  }

 private:
  Resource& upstream_;
  std::int64_t left_ = 0;
};

// How much is taken, and the most that was.
class Counted final : public Resource {
 public:
  struct Amount {
    std::int64_t now = 0;
    std::int64_t peak = 0;

    void add(std::int64_t bytes) { peak = std::max(peak, now += bytes); }
    void remove(std::int64_t bytes) { now -= bytes; }
  };

  explicit Counted(Resource& upstream) : upstream_(upstream) {}

  std::uint64_t take(Form form, std::int64_t bytes) override {
    const std::uint64_t what = upstream_.take(form, bytes);
    if (what != 0) {
      all_.add(bytes);
      of(form).add(bytes);
    }
    return what;
  }

  void give_back(Form form, std::uint64_t what, std::int64_t bytes) override {
    all_.add(-bytes);
    of(form).add(-bytes);
    upstream_.give_back(form, what, bytes);
  }

  const Amount& all() const { return all_; }
  // Bytes taken elsewhere, which count in `all` only.
  void add_foreign(std::int64_t bytes) { all_.add(bytes); }

  const Amount& segments() const { return segments_; }
  const Amount& arenas() const { return arenas_; }
  std::int64_t own() const { return segments_.now + arenas_.now; }

  void reset_peaks() {
    for (Amount* amount : {&all_, &segments_, &arenas_}) amount->peak = amount->now;
  }

 private:
  Amount& of(Form form) { return form == Form::kArenaPage ? arenas_ : segments_; }

  Resource& upstream_;
  Amount all_, segments_, arenas_;
};

}  // namespace memplan::planned

#include "planned/streams.hpp"

namespace memplan::planned {

std::int32_t Streams::find(Stream handle) {
  const auto [found, fresh] =
      numbers_.try_emplace(handle, static_cast<std::int32_t>(handles_.size()));
  if (fresh) handles_.push_back(handle);
  last_ = handle;
  last_number_ = found->second;
  return last_number_;
}

Event Marks::new_event() {
  if (!spare_.empty()) {
    Event event = spare_.back();
    spare_.pop_back();
    return event;
  }
  Event event = nullptr;
  return card_.driver.event_create(&event, kEventDisableTiming) == kSuccess ? event : nullptr;
}

std::int32_t Marks::make(std::int32_t stream) {
  const Current current(card_);
  if (++made_ % kPollEvery == 0) poll();
  Event event = new_event();
  if (event != nullptr && card_.driver.event_record(event, streams_.handle(stream)) != kSuccess) {
    spare_.push_back(event);
    event = nullptr;
  }
  if (event == nullptr && synchronize()) return static_cast<std::int32_t>((first_ - 1) & kMask);
  const auto number = static_cast<std::int32_t>((first_ + kept_.size()) & kMask);
  kept_.push_back({event, false});
  if (event != nullptr) {
    const auto row = static_cast<std::size_t>(stream);
    if (by_stream_.size() <= row) by_stream_.resize(row + 1);
    by_stream_[row].push_back(number);
  }
  return number;
}

bool Marks::passed(std::int32_t mark) const {
  const std::size_t at = place(mark);
  return at >= kept_.size() || kept_[at].passed;
}

bool Marks::wait(std::int32_t stream, std::int32_t mark) {
  if (passed(mark)) return true;
  ++waits_;
  const Current current(card_);
  const Event event = kept_[place(mark)].event;
  if (event != nullptr &&
      card_.driver.stream_wait_event(streams_.handle(stream), event, 0) == kSuccess) {
    return true;
  }
  return synchronize();
}

void Marks::pass(Mark& mark) {
  mark.passed = true;
  if (mark.event != nullptr) spare_.push_back(mark.event);
  mark.event = nullptr;
}

void Marks::trim() {
  while (!kept_.empty() && kept_.front().passed) {
    kept_.pop_front();
    first_ = (first_ + 1) & kMask;
  }
}

void Marks::poll() {
  if (kept_.empty()) return;
  const Current current(card_);
  for (std::deque<std::int32_t>& marks : by_stream_) {
    while (!marks.empty()) {
      Mark& mark = kept_[place(marks.front())];
      if (card_.driver.event_query(mark.event) != kSuccess) break;
      pass(mark);
      marks.pop_front();
    }
  }
  trim();
}

bool Marks::synchronize() {
  const Current current(card_);
  if (card_.driver.context_synchronize() != kSuccess) return false;
  for (Mark& mark : kept_) {
    if (!mark.passed) pass(mark);
  }
  for (std::deque<std::int32_t>& marks : by_stream_) marks.clear();
  trim();
  return true;
}

}  // namespace memplan::planned

#include "planned/upstream.hpp"

#include <algorithm>
#include <iterator>

namespace memplan::planned {

std::int64_t DeviceSegments::place(std::int64_t, std::int64_t bytes, std::int32_t,
                                   bool expandable) {
  if (!expandable) {
    const std::uint64_t address = resource_.take(Form::kSegment, bytes);
    return address == 0 ? kNone : static_cast<std::int64_t>(address);
  }
  auto pages = std::make_unique<Pages>(card_, resource_, Form::kSegmentPage, bytes, page_);
  if (pages->base() == 0) return kNone;
  const auto base = static_cast<std::int64_t>(pages->base());
  expandable_.emplace(base, std::move(pages));
  return base;
}

void DeviceSegments::release(std::int64_t address, std::int64_t bytes) {
  if (expandable_.erase(address) > 0) return;
  resource_.give_back(Form::kSegment, static_cast<std::uint64_t>(address), bytes);
}

DeviceSegments::Part DeviceSegments::part(std::int64_t address) const {
  const auto& [base, pages] = *std::prev(expandable_.upper_bound(address));
  return {*pages, address - base};
}

bool DeviceSegments::map(std::int64_t address, std::int64_t bytes) {
  const auto [pages, lower] = part(address);
  return pages.ensure(lower, lower + bytes);
}

void DeviceSegments::unmap(std::int64_t address, std::int64_t bytes) {
  const auto [pages, lower] = part(address);
  pages.drop(lower, lower + bytes);
}

namespace {

// Addresses for all of the device and an eighth: so much can be fragmented.
caching::Settings settings_for(std::int64_t page, std::int64_t total) {
  caching::Settings settings;
  settings.expandable_segments = page > 0;
  settings.reserve_bytes = total + total / 8;
  if (page > 0) settings.large_segment_size = caching::round_up(settings.large_segment_size, page);
  return settings;
}

}  // namespace

Upstream::Upstream(const Card& card, Resource& resource, Marks& marks, std::int64_t page,
                   std::int64_t total)
    : marks_(marks),
      settings_(settings_for(page, total)),
      segments_(card, resource, page),
      allocator_(settings_, segments_, [this] { return synchronize(); }, false) {}

std::int64_t Upstream::growth(std::int64_t bytes, std::int32_t stream) {
  if (allocator_.has_cached(bytes, stream)) return 0;
  const std::int64_t size = caching::block_size(settings_, bytes);
  if (!settings_.expandable_segments) return caching::segment_size(settings_, size);
  const bool small = size <= caching::kSmallRequest;
  return caching::round_up(size, small ? caching::kSmallSegment : settings_.large_segment_size);
}

caching::Block* Upstream::malloc(std::int64_t bytes, std::int32_t stream) {
  if (waits()) {
    marks_.poll();
    complete();
  }
  return allocator_.malloc(bytes, stream);
}

void Upstream::free(caching::Block* block) {
  allocator_.begin_free(block);
  Awaited awaited{block, {}};
  for (const std::int32_t stream : block->stream_uses) {
    const std::int32_t mark = marks_.make(stream);
    if (!marks_.passed(mark)) awaited.marks.push_back(mark);
  }
  block->stream_uses.clear();
  if (awaited.marks.empty()) {
    allocator_.complete_free(block);
    return;
  }
  block->pending = static_cast<int>(awaited.marks.size());
  awaited_.push_back(std::move(awaited));
}

void Upstream::complete() {
  const auto ready = [this](const Awaited& awaited) {
    const bool passed = std::all_of(awaited.marks.begin(), awaited.marks.end(),
                                    [this](std::int32_t mark) { return marks_.passed(mark); });
    if (!passed) return false;
    awaited.block->pending = 0;
    allocator_.complete_free(awaited.block);
    return true;
  };
  std::erase_if(awaited_, ready);
}

bool Upstream::synchronize() {
  const bool done = marks_.synchronize();
  complete();
  return done;
}

}  // namespace memplan::planned

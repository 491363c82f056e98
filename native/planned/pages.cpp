#include "planned/pages.hpp"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <utility>

namespace memplan::planned {

namespace {
constexpr std::int64_t kMostPages = std::int64_t{1} << 30;
}

Pages::Pages(const Card& card, Resource& resource, Form form, std::int64_t bytes,
             std::int64_t page)
    : card_(card),
      resource_(resource),
      form_(form),
      page_(page),
      shift_(std::countr_zero(static_cast<std::uint64_t>(page))) {
  const std::int64_t count = (bytes + page - 1) / page;
  if (count <= 0 || count > kMostPages) return;
  const auto size = static_cast<std::size_t>(count * page);
  const Current current(card_);
  if (card_.driver.address_reserve(&base_, size, 0, 0, 0) != kSuccess) base_ = 0;
  if (base_ == 0) return;
  handles_.resize(static_cast<std::size_t>(count), 0);
  absent_ = Cells(static_cast<std::int32_t>(count));
  absent_.add(0, static_cast<std::int32_t>(count));
}

Pages::~Pages() {
  if (base_ == 0) return;
  const Current current(card_);
  bool clear = true;
  for (std::int32_t page = 0; page < count(); ++page) {
    if (handle(page) != 0) clear = unmap(page) && clear;
  }
  // With something still mapped the addresses must stay reserved.
  if (clear) card_.driver.address_free(base_, static_cast<std::size_t>(bytes()));
}

bool Pages::add(std::int32_t first, std::int32_t last) {
  const Current current(card_);
  std::vector<std::pair<std::int32_t, std::int32_t>> fresh;  // What this call has mapped.
  for (std::int32_t page = absent_.next_in(first); page < last;) {
    const std::int32_t end = std::min(absent_.next_out(page), last);
    if (!map_run(page, end)) {
      for (const auto& [begin, stop] : fresh) {
        for (std::int32_t each = begin; each < stop; ++each) unmap(each);
      }
      return false;
    }
    fresh.emplace_back(page, end);
    page = absent_.next_in(end);
  }
  return true;
}

// Maps pages and makes them accessible, all or none of them.
bool Pages::map_run(std::int32_t first, std::int32_t last) {
  std::int32_t page = first;
  while (page < last && (handle(page) != 0 || map(page))) ++page;
  const std::int64_t lower = page_ * first, upper = page_ * last;
  if (page == last && allow(card_.number, lower, upper) == kSuccess) {
    // Without it a copy between devices fails, and nothing else.
    for (const DeviceNumber peer : card_.peers) allow(peer, lower, upper);
    absent_.remove(first, last);
    mapped_ += last - first;
    return true;
  }
  for (std::int32_t each = first; each < page; ++each) unmap(each);
  return false;
}

Result Pages::allow(DeviceNumber device, std::int64_t lower, std::int64_t upper) {
  AccessDescription access;
  access.location.id = device;
  return card_.driver.set_access(base_ + static_cast<Address>(lower),
                                 static_cast<std::size_t>(upper - lower), &access, 1);
}

void Pages::grant(DeviceNumber peer) {
  const Current current(card_);
  for_each_run([this, peer](std::int64_t lower, std::int64_t upper) { allow(peer, lower, upper); });
}

bool Pages::map(std::int32_t page) {
  const Handle taken = resource_.take(form_, page_);
  if (taken == 0) return false;
  if (card_.driver.map(address(page), static_cast<std::size_t>(page_), 0, taken, 0) != kSuccess) {
    resource_.give_back(form_, taken, page_);
    return false;
  }
  handle(page) = taken;
  return true;
}

bool Pages::unmap(std::int32_t page) {
  if (absent_.none(page, page + 1)) {
    absent_.add(page, page + 1);
    --mapped_;
  }
  if (card_.driver.unmap(address(page), static_cast<std::size_t>(page_)) != kSuccess) return false;
  resource_.give_back(form_, handle(page), page_);
  handle(page) = 0;
  return true;
}

std::int64_t Pages::missing(std::int64_t lower, std::int64_t upper) const {
  const std::int32_t last = last_of(upper);
  std::int64_t pages = 0;
  for (auto page = absent_.next_in(first_of(lower)); page < last;) {
    const std::int32_t end = std::min(absent_.next_out(page), last);
    pages += end - page;
    page = absent_.next_in(end);
  }
  return pages * page_;
}

bool Pages::any_unused(const InUse& in_use) const {
  if (mapped_ == 0) return false;
  for (std::int32_t page = absent_.next_out(0); page < count(); page = absent_.next_out(page + 1)) {
    if (!in_use(page_ * page, page_ * (page + 1))) return true;
  }
  return false;
}

std::int64_t Pages::give_back(const InUse& in_use, std::int64_t enough,
                              const std::vector<std::int32_t>& order) {
  const Current current(card_);
  std::int64_t given = 0;
  for (const std::int32_t page : order) {
    if (given >= enough) break;
    if (handle(page) == 0) continue;
    if (!in_use(page_ * page, page_ * (page + 1)) && unmap(page)) given += page_;
  }
  return given;
}

void Pages::drop(std::int64_t lower, std::int64_t upper) {
  const Current current(card_);
  const auto last = static_cast<std::int32_t>(upper / page_);
  for (auto page = static_cast<std::int32_t>((lower + page_ - 1) / page_); page < last; ++page) {
    if (handle(page) != 0) unmap(page);
  }
}

void Pages::for_each_run(const std::function<void(std::int64_t, std::int64_t)>& visit) const {
  for (std::int32_t page = absent_.next_out(0); page < count();) {
    const std::int32_t end = absent_.next_in(page);
    visit(page_ * page, page_ * end);
    page = absent_.next_out(end);
  }
}

}  // namespace memplan::planned

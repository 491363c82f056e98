#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "planned/cells.hpp"
#include "planned/resource.hpp"

namespace memplan::planned {

// A range of addresses on one device; its pages are mapped when they are first needed and given
// back when nothing uses them.
class Pages {
 public:
  // `resource` gives the memory; `page` is a power of two and fits the driver's granularity.
  Pages(const Card& card, Resource& resource, Form form, std::int64_t bytes, std::int64_t page);
  // Gives everything back; no work may still use it.
  ~Pages();
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  // 0 when no addresses could be reserved.
  Address base() const { return base_; }
  std::int64_t bytes() const { return page_ * static_cast<std::int64_t>(handles_.size()); }
  std::int64_t mapped() const { return page_ * mapped_; }
  std::int64_t page() const { return page_; }
  std::int32_t count() const { return static_cast<std::int32_t>(handles_.size()); }

  // Whether [lower, upper) can be used.
  bool ready(std::int64_t lower, std::int64_t upper) const {
    return mapped_ == count() || absent_.none(first_of(lower), last_of(upper));
  }
  // Makes [lower, upper) usable. False, with nothing changed, when memory is out.
  bool ensure(std::int64_t lower, std::int64_t upper) {
    return ready(lower, upper) || add(first_of(lower), last_of(upper));
  }
  // How much `ensure` would have to take.
  std::int64_t missing(std::int64_t lower, std::int64_t upper) const;
  using InUse = std::function<bool(std::int64_t, std::int64_t)>;
  // Whether any page [lower, upper) can be used of which `in_use(lower, upper)` is false.
  bool any_unused(const InUse& in_use) const;
  // Gives back such pages, in this order, until it is `enough` bytes: no work may still use them.
  // How many bytes.
  std::int64_t give_back(const InUse& in_use, std::int64_t enough,
                         const std::vector<std::int32_t>& order);
  // Gives back the pages in [lower, upper).
  void drop(std::int64_t lower, std::int64_t upper);
  // Makes what is mapped accessible to another device.
  void grant(DeviceNumber peer);
  // Calls `visit(lower, upper)` for each range of mapped pages.
  void for_each_run(const std::function<void(std::int64_t, std::int64_t)>& visit) const;

 private:
  // The pages [first_of(lower), last_of(upper)) hold [lower, upper).
  std::int32_t first_of(std::int64_t lower) const {
    return static_cast<std::int32_t>(lower >> shift_);
  }
  std::int32_t last_of(std::int64_t upper) const {
    return static_cast<std::int32_t>((upper - 1) >> shift_) + 1;
  }
  Handle& handle(std::int32_t page) { return handles_[static_cast<std::size_t>(page)]; }
  Address address(std::int32_t page) const {
    return base_ + static_cast<Address>(page) * static_cast<Address>(page_);
  }
  bool add(std::int32_t first, std::int32_t last);
  bool map_run(std::int32_t first, std::int32_t last);
  bool map(std::int32_t page);
  Result allow(DeviceNumber device, std::int64_t lower, std::int64_t upper);
  bool unmap(std::int32_t page);

  const Card& card_;
  Resource& resource_;
  const Form form_;
  const std::int64_t page_;  // A power of two,
  const int shift_;          // this one.
  Address base_ = 0;
  std::vector<Handle> handles_;  // By page; 0 where nothing is mapped.
  // Pages that cannot be used. One that has a handle all the same is mapped without being
  // accessible, because the driver would not unmap it again.
  Cells absent_{0};
  std::int64_t mapped_ = 0;  // Pages that can be used.
};

}  // namespace memplan::planned

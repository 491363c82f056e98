#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "caching/allocator.hpp"
#include "planned/pages.hpp"
#include "planned/resource.hpp"
#include "planned/streams.hpp"

namespace memplan::planned {

// Segments for the caching allocator from a resource.
class DeviceSegments final : public caching::SegmentSource {
 public:
  // `page` is a multiple of the driver's granularity; 0 where the device cannot map pages.
  DeviceSegments(const Card& card, Resource& resource, std::int64_t page)
      : card_(card), resource_(resource), page_(page) {}

  std::int64_t place(std::int64_t event, std::int64_t bytes, std::int32_t stream,
                     bool expandable) override;
  void release(std::int64_t address, std::int64_t bytes) override;
  bool map(std::int64_t address, std::int64_t bytes) override;
  void unmap(std::int64_t address, std::int64_t bytes) override;
  void grant(DeviceNumber peer) {
    for (const auto& [base, pages] : expandable_) pages->grant(peer);
  }

 private:
  struct Part {
    Pages& pages;
    std::int64_t lower;
  };
  Part part(std::int64_t address) const;

  const Card& card_;
  Resource& resource_;
  const std::int64_t page_;
  std::map<std::int64_t, std::unique_ptr<Pages>> expandable_;  // By address.
};

// PyTorch's caching allocator on real memory: what serves requests that no plan foresees. With
// expandable segments where the device can map pages, so that what of them is unused can go to an
// arena.
class Upstream {
 public:
  // `total` is the device's memory.
  Upstream(const Card& card, Resource& resource, Marks& marks, std::int64_t page,
           std::int64_t total);

  // Null when memory is out after all that is cached was given back.
  caching::Block* malloc(std::int64_t bytes, std::int32_t stream);
  void free(caching::Block* block);
  void grant(DeviceNumber peer) { segments_.grant(peer); }
  void release_cached() { allocator_.release_cached(); }
  // The most that `malloc` would take from the device; 0 where a cached block serves.
  std::int64_t growth(std::int64_t bytes, std::int32_t stream);
  // Segments' bytes that no block in use, or waited for, holds.
  std::int64_t cached() const { return statistics().reserved - statistics().active; }
  // Whether freed blocks wait for other streams.
  bool waits() const { return !awaited_.empty(); }
  // Takes back the blocks for which nothing has to be waited for any longer.
  void complete();

  const caching::Statistics& statistics() const { return allocator_.statistics(); }
  const caching::Allocator& allocator() const { return allocator_; }

 private:
  struct Awaited {
    caching::Block* block;
    std::vector<std::int32_t> marks;
  };

  bool synchronize();

  Marks& marks_;
  const caching::Settings settings_;
  DeviceSegments segments_;
  caching::Allocator allocator_;
  std::vector<Awaited> awaited_;
};

}  // namespace memplan::planned

#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "planned/resource.hpp"
#include "planned/streams.hpp"
#include "planned/upstream.hpp"

namespace memplan::planned {

inline constexpr std::int64_t kLeastPage = std::int64_t{2} << 20;

// A device that can be used: its memory, through the stack of resources, and its streams.
class Hardware {
 public:
  // Null, with the reason in `why`, when the driver or the device cannot be used.
  static std::unique_ptr<Hardware> start(int device, std::string& why);

  Card card;
  std::int64_t page;   // 0 where the device cannot map pages.
  std::int64_t total;  // Memory of the device.
  DeviceMemory memory;
  Limit limit{memory};
  Failure failure{limit};
  Counted counted{failure};
  Streams streams;
  Marks marks{card, streams};
  Upstream upstream{card, counted, marks, page, total};

  Hardware(const Card& the_card, std::int64_t page_bytes, std::int64_t total_bytes,
           const AllocationProperties& properties)
      : card(the_card), page(page_bytes), total(total_bytes), memory(card, properties) {}
  Hardware(const Hardware&) = delete;
  Hardware& operator=(const Hardware&) = delete;
};

}  // namespace memplan::planned

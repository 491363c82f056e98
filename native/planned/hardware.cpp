#include "planned/hardware.hpp"

#include <algorithm>
#include <bit>

namespace memplan::planned {

namespace {

bool has(const Driver& driver, DeviceNumber device, int attribute) {
  int value = 0;
  return driver.device_attribute(&value, attribute, device) == kSuccess && value != 0;
}

}  // namespace

std::unique_ptr<Hardware> Hardware::start(int device, std::string& why) {
  const Driver* table = driver();
  if (table == nullptr) {
    why = driver_error();
    return nullptr;
  }
  DeviceNumber number = 0;
  Context context = nullptr;
  std::size_t total = 0;
  Result result = table->device_get(&number, device);
  if (result == kSuccess) result = table->total_memory(&total, number);
  if (result == kSuccess) result = table->primary_retain(&context, number);
  if (result != kSuccess) {
    why = "device " + std::to_string(device) + " cannot be used: " + name_of(*table, result);
    return nullptr;
  }
  AllocationProperties properties;
  properties.location.id = number;
  properties.rdma = has(*table, number, kAttributeRdmaWithVirtualMemory) ? 1 : 0;
  std::size_t granularity = 0;
  const bool pages = has(*table, number, kAttributeVirtualMemory) &&
                     table->granularity(&granularity, &properties, 0) == kSuccess &&
                     granularity > 0 && granularity < (std::size_t{1} << 40);
  const std::int64_t page =
      pages ? std::max(kLeastPage, static_cast<std::int64_t>(std::bit_ceil(granularity))) : 0;
  return std::make_unique<Hardware>(Card{*table, number, context, {}}, page,
                                    static_cast<std::int64_t>(total), properties);
}

}  // namespace memplan::planned

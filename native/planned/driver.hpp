#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace memplan::planned {

// The part of the CUDA driver's interface that an allocator needs, by its documented binary layout:
// it is looked up at run time, so that building and loading need no CUDA.
using Result = int;
using DeviceNumber = int;
using Context = void*;
using Stream = void*;
using Event = void*;
using Address = unsigned long long;
using Handle = unsigned long long;

inline constexpr Result kSuccess = 0;
inline constexpr Result kOutOfMemory = 2;
inline constexpr Result kNotReady = 600;
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr int kAttributeVirtualMemory = 102;
inline constexpr int kAttributeRdmaWithVirtualMemory = 110;

struct MemoryLocation {
  int type = 1;  // A device.
  int id = 0;
};

struct AllocationProperties {
  int type = 1;  // Pinned.
  int handle_types = 0;
  MemoryLocation location;
  void* windows = nullptr;
  unsigned char compression = 0;
  unsigned char rdma = 0;
  unsigned short usage = 0;
  unsigned char reserved[4] = {};
};

struct AccessDescription {
  MemoryLocation location;
  int flags = 3;  // Read and write.
};

struct Driver {
  Result (*init)(unsigned);
  Result (*device_get)(DeviceNumber*, int);
  Result (*device_attribute)(int*, int, DeviceNumber);
  Result (*can_access_peer)(int*, DeviceNumber, DeviceNumber);
  Result (*total_memory)(std::size_t*, DeviceNumber);
  Result (*primary_retain)(Context*, DeviceNumber);
  Result (*context_push)(Context);
  Result (*context_pop)(Context*);
  Result (*context_synchronize)();
  Result (*mem_alloc)(Address*, std::size_t);
  Result (*mem_free)(Address);
  Result (*granularity)(std::size_t*, const AllocationProperties*, int);
  Result (*address_reserve)(Address*, std::size_t, std::size_t, Address, unsigned long long);
  Result (*address_free)(Address, std::size_t);
  Result (*create)(Handle*, std::size_t, const AllocationProperties*, unsigned long long);
  Result (*release)(Handle);
  Result (*map)(Address, std::size_t, std::size_t, Handle, unsigned long long);
  Result (*unmap)(Address, std::size_t);
  Result (*set_access)(Address, std::size_t, const AccessDescription*, std::size_t);
  Result (*event_create)(Event*, unsigned);
  Result (*event_destroy)(Event);
  Result (*event_record)(Event, Stream);
  Result (*event_query)(Event);
  Result (*stream_wait_event)(Stream, Event, unsigned);
  Result (*error_name)(Result, const char**);
};

// The driver, loaded and initialised at the first call; null with the reason in `driver_error`.
const Driver* driver();
// Another library than libcuda.so.1; before the first call of `driver`.
void use_driver(const char* path);
// Empty when the driver is there, or when nothing has asked for it yet. Never changes once set.
const char* driver_error();
// Where the driver is there and a device of it cannot be used; the first reason stays.
void set_driver_error(const std::string& reason);
std::string name_of(const Driver& driver, Result result);

}  // namespace memplan::planned

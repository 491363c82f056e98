#pragma once

#include <atomic>
#include <cstdint>

namespace memplan::planned {

// Every request of every device as a line of a CSV file.
namespace request_log {

// Ends the log that there is; null opens no other. False when the file cannot be written.
bool open(const char* path);
inline std::atomic<bool> opened{false};
inline bool on() { return opened.load(std::memory_order_relaxed); }
void write(const char* action, int device, const void* address, std::int64_t bytes,
           const void* stream);

}  // namespace request_log

}  // namespace memplan::planned

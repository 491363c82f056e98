#include "planned/request_log.hpp"

#include <chrono>
#include <cstdio>
#include <mutex>

namespace memplan::planned::request_log {

namespace {

struct Log {
  std::mutex mutex;
  std::FILE* file = nullptr;
};

Log& log() {
  static Log* one = new Log;  // Outlives the threads that write to it.
  return *one;
}

}  // namespace

bool open(const char* path) {
  Log& one = log();
  const std::lock_guard guard(one.mutex);
  opened.store(false, std::memory_order_relaxed);
  bool good = true;
  if (one.file != nullptr) good = std::fclose(one.file) == 0;
  one.file = nullptr;
  if (path == nullptr) return good;
  one.file = std::fopen(path, "we");
  if (one.file == nullptr) return false;
  std::fputs("nanoseconds,action,device,address,bytes,stream\n", one.file);
  opened.store(true, std::memory_order_relaxed);
  return good;
}

void write(const char* action, int device, const void* address, std::int64_t bytes,
           const void* stream) {
  Log& one = log();
  const std::lock_guard guard(one.mutex);
  if (one.file == nullptr) return;
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  const long long nanoseconds =
      std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
  std::fprintf(one.file, "%lld,%s,%d,%p,%lld,%p\n", nanoseconds, action, device, address,
               static_cast<long long>(bytes), stream);
}

}  // namespace memplan::planned::request_log

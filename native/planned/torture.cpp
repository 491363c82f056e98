// Random requests, releases, uses by other streams, plans that come and go, memory that runs out and
// calls that fail, from several threads on two devices. All that touches memory is work of streams
// that lag: each unit of a block is written, and found unchanged before the block is released. Built
// with sanitizers it looks for races and memory errors as well.
//
//   memplan_torture [OPERATIONS [SEED [THREADS]]]
//   memplan_torture faults: every call to the driver that a small job makes fails, one at a time,
//   and then from there on.
#include <dlfcn.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "planned/c_api.h"
#include "planned/torture_plan.hpp"
#include "standin_cuda.hpp"

namespace memplan::planned {
namespace {

using Random = std::mt19937_64;

constexpr int kDevices = 2;
constexpr std::uintptr_t kStreams = 4;  // Of a device; the first is the default one.
constexpr std::int64_t kUnit = 512;
constexpr std::int64_t kMemory = std::int64_t{96} << 20;
constexpr std::size_t kHeld = 48;  // Blocks of a thread.

std::atomic<std::int64_t> errors{0};

struct Block {
  char* memory = nullptr;
  std::int64_t bytes = 0;
  int device = 0;
  std::uintptr_t stream = 0;
  std::uint64_t tag = 0;
  bool shared = false;  // Another stream uses it.
};

void* handle(std::uintptr_t stream) { return reinterpret_cast<void*>(stream); }

struct Touch {
  Block block;
  bool write;
};

// What a kernel would do: writes the tag into every unit of the block, or checks it.
void touch(void* argument) {
  const auto* one = static_cast<const Touch*>(argument);
  const Block& block = one->block;
  for (std::int64_t at = 0; at + 8 <= block.bytes; at += kUnit) {
    auto* unit = reinterpret_cast<std::uint64_t*>(block.memory + at);
    const std::uint64_t expected = block.tag + static_cast<std::uint64_t>(at);
    if (one->write) {
      *unit = expected;
    } else if (*unit != expected && errors.fetch_add(1) == 0) {
      std::fprintf(stderr, "a block of %lld bytes on stream %d of device %d has changed at %lld\n",
                   static_cast<long long>(block.bytes), static_cast<int>(block.stream),
                   block.device, static_cast<long long>(at));
    }
  }
  delete one;
}

void launch(const Block& block, std::uintptr_t stream, bool write) {
  standin_launch(block.device, handle(stream), touch, new Touch{block, write});
}

// One stream comes after another, as a program that passes a block on makes it.
void pass(int device, std::uintptr_t from, std::uintptr_t to) {
  standin_pass(device, handle(from), handle(to));
}

// Blocks that one thread makes and another releases.
struct Exchange {
  std::mutex mutex;
  std::vector<Block> blocks;
};

class Worker {
 public:
  Worker(std::uint64_t seed, int number, Exchange& exchange, std::vector<TorturePlan> plans)
      : random_(seed * 1000 + static_cast<std::uint64_t>(number)),
        number_(number),
        exchange_(exchange),
        plans_(std::move(plans)) {}

  void run(std::int64_t operations) {
    while (done_ < operations && errors == 0) {
      if (number_ == 0) {
        job(plans_[below(plans_.size())]);
      } else {
        step();
      }
    }
    while (!held_.empty()) release(held_.size() - 1);
  }

  // The job that a plan was made for, with some requests more or less.
  void job(const TorturePlan& plan) {
    const memplan_plan columns = plan.columns();
    memplan_load(0, &columns, 0, nullptr, 0);
    std::vector<Block> rows(plan.size());
    std::vector<bool> alive(plan.size(), false);
    for (const std::int64_t call : plan.calls(3)) {
      const auto row = static_cast<std::size_t>(call < 0 ? ~call : call);
      if (alive[row]) {
        free(rows[row]);
        alive[row] = false;
      }
      if (call < 0 || below(50) == 0 || errors > 0) continue;
      const std::int64_t bytes = plan.bytes[row] + (below(50) == 0 ? 4096 : 0);
      alive[row] = make(rows[row], bytes, 0, static_cast<std::uintptr_t>(plan.stream[row]));
      // As the job goes on, and now and then as it does not.
      const std::int64_t phase = below(100) == 0 ? -1 : plan.phase[row];
      if (phase >= 0 || below(20) == 0) memplan_enter_phase(0, static_cast<std::int32_t>(phase));
      if (below(3) == 0) standin_step(random_());
    }
    for (std::size_t row = 0; row < rows.size(); ++row) {
      if (alive[row]) free(rows[row]);
    }
  }

  std::int64_t requests() const { return requests_; }
  std::int64_t refused() const { return refused_; }

 private:
  std::uint64_t below(std::uint64_t limit) { return random_() % limit; }

  bool make(Block& block, std::int64_t bytes, int device, std::uintptr_t stream) {
    ++requests_;
    ++done_;
    void* memory = memplan_malloc(bytes, device, handle(stream));
    if (memory == nullptr) return ++refused_, false;
    block = {static_cast<char*>(memory), bytes, device, stream, random_() | 1, false};
    launch(block, stream, true);
    return true;
  }

  // Another stream reads it, which the allocator is told; or, with a wait for it, is not.
  void share(Block& block) {
    const std::uintptr_t other = below(kStreams);
    if (other == block.stream) return;
    pass(block.device, block.stream, other);
    launch(block, other, false);
    if (below(2) == 0) {
      memplan_record_stream(block.memory, handle(other));
    } else {
      pass(block.device, other, block.stream);
    }
  }

  void free(Block& block) {
    ++done_;
    if (below(4) == 0) share(block);
    launch(block, block.stream, false);
    memplan_free(block.memory, block.bytes, block.device, handle(block.stream));
  }

  void release(std::size_t at) {
    free(held_[at]);
    held_[at] = held_.back();
    held_.pop_back();
  }

  std::int64_t size() {
    const std::int64_t scale = std::int64_t{1} << (9 + below(below(32) == 0 ? 14 : 9));
    return 1 + static_cast<std::int64_t>(below(static_cast<std::uint64_t>(scale)));
  }

  void step() {
    if (below(32) == 0) standin_step(random_());
    const std::uint64_t what = below(4096);
    if (what < 4) return disturb(static_cast<int>(what));
    if (what < 256) return exchange();
    if (held_.size() < kHeld && below(8) < 5) {
      Block block;
      if (make(block, size(), static_cast<int>(below(kDevices)), below(kStreams))) {
        held_.push_back(block);
      }
    } else if (!held_.empty()) {
      release(below(held_.size()));
    }
    if (below(2) == 0) standin_step(random_());
  }

  void exchange() {
    const std::lock_guard guard(exchange_.mutex);
    if (!held_.empty() && exchange_.blocks.size() < kHeld) {
      exchange_.blocks.push_back(held_.back());
      held_.pop_back();
    }
    if (!exchange_.blocks.empty() && below(2) == 0) {
      held_.push_back(exchange_.blocks.front());
      exchange_.blocks.erase(exchange_.blocks.begin());
    }
  }

  void disturb(int what) {
    const int device = static_cast<int>(below(kDevices));
    memplan_statistics statistics;
    memplan_block blocks[64];
    memplan_event events[64];
    switch (what) {
      case 0: return memplan_empty_cache(device);
      case 1:
        memplan_read_statistics(device, &statistics);
        memplan_snapshot(device, blocks, 64);
        return memplan_record(device, 1000);
      case 2:
        memplan_mark(device, 1);
        memplan_take_events(device, events, 64, nullptr);
        return memplan_fail_at(device, static_cast<std::int64_t>(below(8)));
      default:
        if (below(8) == 0) return memplan_set_limit(device, kMemory / 2);
        memplan_set_limit(device, -1);
        load(device);
    }
  }

  void load(int device) {
    if (below(8) == 0) return memplan_unload(device);
    const TorturePlan& plan = plans_[below(plans_.size())];
    const memplan_plan columns = plan.columns();
    char why[200] = "";
    if (memplan_load(device, &columns, below(2) == 0, why, sizeof why) != 0) ++refused_;
  }

  Random random_;
  const int number_;
  Exchange& exchange_;
  const std::vector<TorturePlan> plans_;
  std::vector<Block> held_;
  std::int64_t done_ = 0, requests_ = 0, refused_ = 0;
};

// What must be true when all is released and nothing fails any longer.
void check_clean(int device) {
  memplan_fail_at(device, 0);
  memplan_set_limit(device, -1);
  memplan_stop_recording(device);
  memplan_unload(device);
  memplan_empty_cache(device);
  memplan_statistics now{};
  memplan_read_statistics(device, &now);
  if (now.allocated != 0 || now.requested != 0 || now.reserved != 0 || now.fallback_bytes != 0 ||
      now.mallocs != now.frees + now.ooms || standin_used(device) != 0) {
    std::fprintf(stderr, "device %d keeps %lld allocated, %lld reserved, %lld used\n", device,
                 static_cast<long long>(now.allocated), static_cast<long long>(now.reserved),
                 static_cast<long long>(standin_used(device)));
    ++errors;
  }
}

void check_driver() {
  const auto limit = [](const char* what, std::int64_t most) {
    if (standin_count(what) <= most) return;
    std::fprintf(stderr, "%s are left: %d\n", what, static_cast<int>(standin_count(what)));
    ++errors;
  };
  for (const char* what : {"handles", "mappings", "segments"}) limit(what, 0);
  // Addresses for an expandable segment that got no memory are kept for the next attempt.
  limit("reservations", 2 * static_cast<std::int64_t>(kStreams) * kDevices);
  if (standin_faults() != 0) ++errors;
}

void print_statistics(int device) {
  memplan_statistics now{};
  memplan_read_statistics(device, &now);
  std::printf("device %d: %lld requests, %lld planned, %lld dynamic, %lld adopted, %lld missed, "
              "%lld resyncs, %lld retries, %lld refused, %lld waits\n",
              device, static_cast<long long>(now.mallocs), static_cast<long long>(now.hits),
              static_cast<long long>(now.dynamic), static_cast<long long>(now.adopted),
              static_cast<long long>(now.misses), static_cast<long long>(now.resyncs),
              static_cast<long long>(now.retries), static_cast<long long>(now.ooms),
              static_cast<long long>(now.waits));
}

void use_standin() {
  Dl_info info{};
  dladdr(reinterpret_cast<void*>(standin_lag), &info);
  memplan_use_driver(info.dli_fname);
}

// The n-th call of a function fails during a job, or it and all after it. Whether it came to that.
bool fail_during_job(const char* function, std::int64_t n, bool onwards, const TorturePlan& plan) {
  Exchange exchange;
  Worker worker(static_cast<std::uint64_t>(n), 0, exchange, {});
  const std::int64_t before = standin_calls(function);
  standin_lag(1);
  standin_fail(function, onwards ? -n : n);
  worker.job(plan);
  memplan_empty_cache(0);
  const bool failed = standin_calls(function) - before >= n;
  standin_fail(function, 0);
  standin_lag(0);
  return failed;
}

int faults(std::uint64_t seed) {
  use_standin();
  standin_set_bytes(kMemory);
  Random random(seed);
  std::int64_t jobs = 0;
  const auto fail_each = [&](const char* function, bool clean) {
    const std::int64_t before = jobs;
    for (const bool onwards : {false, true}) {
      const TorturePlan plan = random_plan(random, kStreams);
      for (std::int64_t n = 1; errors == 0; n += 1 + n / 8) {
        if (!fail_during_job(function, n, onwards, plan)) break;
        ++jobs;
        if (clean) check_clean(0);
        if (errors > 0) std::fprintf(stderr, "call %d of %s\n", static_cast<int>(n), function);
      }
    }
    if (errors == 0 && jobs == before) {
      std::fprintf(stderr, "%s is never called\n", function);
      ++errors;
    }
  };
  for (const char* function :
       {"cuEventCreate", "cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess",
        "cuEventRecord", "cuEventQuery", "cuStreamWaitEvent", "cuCtxSynchronize"}) {
    fail_each(function, true);
  }
  check_driver();
  // What cannot be given back stays, and nothing else may come of it.
  standin_set_bytes(kMemory * 1000);
  for (const char* function : {"cuMemUnmap", "cuMemRelease", "cuMemAddressFree"}) {
    fail_each(function, false);
  }
  if (standin_faults() != 0) ++errors;
  print_statistics(0);
  std::printf("%lld jobs with failing calls, %lld errors\n", static_cast<long long>(jobs),
              static_cast<long long>(errors));
  return errors == 0 ? 0 : 1;
}

int torture(std::int64_t operations, std::uint64_t seed, int threads) {
  use_standin();
  standin_set_bytes(kMemory);
  standin_lag(1);
  standin_fail_often(200, seed);
  Random random(seed);
  std::vector<TorturePlan> plans;
  for (int plan = 0; plan < 6; ++plan) plans.push_back(random_plan(random, kStreams));
  Exchange exchange;
  std::vector<Worker> workers;
  for (int number = 0; number < threads; ++number) {
    workers.emplace_back(seed, number, exchange, plans);
  }
  std::vector<std::thread> running;
  for (Worker& worker : workers) {
    running.emplace_back([&worker, operations, threads] { worker.run(operations / threads); });
  }
  for (std::thread& thread : running) thread.join();
  for (const Block& block : exchange.blocks) {
    launch(block, block.stream, false);
    memplan_free(block.memory, block.bytes, block.device, handle(block.stream));
  }
  standin_fail_often(0, 0);
  standin_lag(0);
  for (int device = 0; device < kDevices; ++device) {
    check_clean(device);
    print_statistics(device);
  }
  check_driver();
  std::int64_t requests = 0, refused = 0;
  for (const Worker& worker : workers) {
    requests += worker.requests();
    refused += worker.refused();
  }
  std::printf("%lld requests of %d threads, %lld refused, %lld errors\n",
              static_cast<long long>(requests), threads, static_cast<long long>(refused),
              static_cast<long long>(errors));
  return errors == 0 ? 0 : 1;
}

}  // namespace
}  // namespace memplan::planned

int main(int argc, char** argv) {
  setenv("STANDIN_CUDA_DEVICES", "2", 1);
  if (argc > 1 && std::string(argv[1]) == "faults") {
    return memplan::planned::faults(argc > 2 ? static_cast<std::uint64_t>(std::atoll(argv[2])) : 1);
  }
  const std::int64_t operations = argc > 1 ? std::atoll(argv[1]) : 1'000'000;
  const auto seed = static_cast<std::uint64_t>(argc > 2 ? std::atoll(argv[2]) : 1);
  return memplan::planned::torture(operations, seed, argc > 3 ? std::atoi(argv[3]) : 4);
}

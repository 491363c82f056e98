// How long a request and its release take: at planned places, without a plan, and through a plain
// best-fit caching allocator, in one process. `speed DRIVER JOB ROUNDS` prints one JSON object.
// JOB holds 64-bit numbers: a plan's `requests, setup, start, clock, arena_bytes, phases`, its
// columns bytes, stream, phase, lower, upper, offset; then how many calls the setup and how many
// the round make, and the calls: a request's row, or ~row for its release.

#include <time.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "planned/c_api.h"
#include "planned/plain.hpp"

namespace memplan::planned {
namespace {

constexpr int kRepeats = 5;
constexpr int kThreads = 4;

using Numbers = std::vector<std::int64_t>;

struct Job {
  memplan_plan plan{};
  std::array<Numbers, 6> columns;
  Numbers no_space, no_spaces = Numbers(1);
  Numbers setup, round;
};

Numbers read_numbers(const std::string& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) throw std::runtime_error("cannot read " + path);
  Numbers numbers(static_cast<std::size_t>(file.tellg()) / sizeof(std::int64_t));
  file.seekg(0);
  file.read(reinterpret_cast<char*>(numbers.data()),
            static_cast<std::streamsize>(numbers.size() * sizeof(std::int64_t)));
  return numbers;
}

void fill(Job& job) {
  memplan_plan& plan = job.plan;
  plan.abi = MEMPLAN_ABI;
  plan.bytes = job.columns[0].data();
  plan.stream = job.columns[1].data();
  plan.phase = job.columns[2].data();
  plan.lower = job.columns[3].data();
  plan.upper = job.columns[4].data();
  plan.offset = job.columns[5].data();
  job.no_space.assign(job.columns[0].size(), -1);
  plan.space = job.no_space.data();
  plan.space_ranges = job.no_spaces.data();
}

Job read_job(const std::string& path) {
  const Numbers numbers = read_numbers(path);
  auto next = numbers.begin();
  const auto take = [&](std::int64_t count) {
    if (numbers.end() - next < count) throw std::runtime_error(path + " is too short");
    next += count;
    return Numbers(next - count, next);
  };
  Job job;
  const Numbers head = take(6);
  job.plan.requests = head[0];
  job.plan.setup = head[1];
  job.plan.start = head[2];
  job.plan.clock = head[3];
  job.plan.arena_bytes = head[4];
  job.plan.phases = head[5];
  for (Numbers& column : job.columns) column = take(head[0]);
  const Numbers counts = take(2);
  job.setup = take(counts[0]);
  job.round = take(counts[1]);
  return job;
}

struct ThroughLibrary {
  int device = 0;
  void* malloc(std::int64_t bytes) { return memplan_malloc(bytes, device, nullptr); }
  void free(void* pointer, std::int64_t bytes) { memplan_free(pointer, bytes, device, nullptr); }
  void enter(std::int64_t phase) { memplan_enter_phase(device, static_cast<int>(phase)); }
};

struct ThroughPlain {
  PlainAllocator allocator;
  void* malloc(std::int64_t bytes) { return allocator.malloc(bytes, nullptr); }
  void free(void* pointer, std::int64_t) { allocator.free(pointer); }
  void enter(std::int64_t) {}
};

// Of this thread: what else the machine does is not in it.
double cpu_nanoseconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return 1e9 * static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec);
}

// Runs the calls of a job: the setup once, then as many rounds as asked for.
template <typename Allocator>
class Runner {
 public:
  Runner(const Job& job, Allocator& allocator)
      : job_(job), allocator_(allocator), held_(static_cast<std::size_t>(job.plan.requests)) {
    run(job.setup);
  }

  // Nanoseconds of the processor for a request with its release.
  double rounds(std::int64_t count) {
    const double start = cpu_nanoseconds();
    for (std::int64_t round = 0; round < count; ++round) run(job_.round);
    const double spent = cpu_nanoseconds() - start;
    return 2 * spent / static_cast<double>(count) / static_cast<double>(job_.round.size());
  }

  void finish() {
    for (std::size_t row = 0; row < held_.size(); ++row) release(row);
  }

 private:
  void run(const Numbers& calls) {
    std::int64_t phase = -1;
    for (const std::int64_t call : calls) {
      if (call < 0) {
        release(static_cast<std::size_t>(~call));
        continue;
      }
      const auto row = static_cast<std::size_t>(call);
      if (const std::int64_t now = job_.plan.phase[row]; now >= 0 && now != phase) {
        allocator_.enter(phase = now);
      }
      held_[row] = allocator_.malloc(job_.plan.bytes[row]);
      if (held_[row] == nullptr) throw std::runtime_error("out of memory");
    }
  }

  void release(std::size_t row) {
    if (held_[row] != nullptr) allocator_.free(held_[row], job_.plan.bytes[row]);
    held_[row] = nullptr;
  }

  const Job& job_;
  Allocator& allocator_;
  std::vector<void*> held_;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// A plan whose requests are of one size, so that whichever thread comes next, its request is the
// plan's next one. Places recur so late that a thread that loses its core while it holds one is in
// the way of few others.
constexpr std::int64_t kLanes = 1024;
constexpr std::int64_t kEqualBytes = 3 << 20;

Job equal_job() {
  Job job;
  const std::int64_t rows = 4 * kLanes;
  job.plan.requests = rows;
  job.plan.clock = 2 * rows;
  job.plan.arena_bytes = kLanes * kEqualBytes;
  job.plan.phases = 1;
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t upper = std::min(row + kLanes, rows);
    const std::array<std::int64_t, 6> values{kEqualBytes, 0, 0, row, upper,
                                             row % kLanes * kEqualBytes};
    for (std::size_t at = 0; at < values.size(); ++at) job.columns[at].push_back(values[at]);
  }
  return job;
}

// Nanoseconds a request with its release while `kThreads` threads make them.
template <typename Allocator>
double threads_pair(Allocator& allocator, std::int64_t pairs) {
  const auto work = [&] {
    for (std::int64_t at = 0; at < pairs; ++at) {
      allocator.free(allocator.malloc(kEqualBytes), kEqualBytes);
    }
  };
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::thread> threads;
  for (int number = 0; number < kThreads; ++number) threads.emplace_back(work);
  for (std::thread& thread : threads) thread.join();
  const std::chrono::duration<double, std::nano> spent = std::chrono::steady_clock::now() - start;
  return spent.count() / static_cast<double>(pairs * kThreads);
}

void load(const Job& job, int device) {
  std::array<char, 512> why{};
  if (memplan_load(device, &job.plan, 0, why.data(), why.size()) != 0) {
    throw std::runtime_error(std::string("plan refused: ") + why.data());
  }
}

struct Row {
  std::vector<double> planned, unplanned, plain;
  memplan_statistics statistics{};
};

void print(const char* name, const Row& row) {
  std::printf(
      "\"%s\": {\"planned_ns\": %.2f, \"unplanned_ns\": %.2f, \"plain_ns\": %.2f, "
      "\"requests\": %lld, \"hits\": %lld}",
      name, median(row.planned), row.unplanned.empty() ? 0.0 : median(row.unplanned),
      median(row.plain), static_cast<long long>(row.statistics.mallocs),
      static_cast<long long>(row.statistics.hits));
}

// The rounds of the job, by turns through each of the three.
Row one_thread(const Job& job, std::int64_t rounds) {
  ThroughLibrary planned{0};
  ThroughLibrary unplanned{1};
  ThroughPlain plain;
  load(job, planned.device);
  Runner with(job, planned);
  Runner without(job, unplanned);
  Runner beside(job, plain);
  with.rounds(2);
  without.rounds(2);
  beside.rounds(2);
  Row row;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    row.planned.push_back(with.rounds(rounds));
    row.unplanned.push_back(without.rounds(rounds));
    row.plain.push_back(beside.rounds(rounds));
  }
  memplan_read_statistics(planned.device, &row.statistics);
  with.finish();
  without.finish();
  beside.finish();
  return row;
}

Row many_threads(std::int64_t pairs) {
  Job job = equal_job();
  fill(job);
  ThroughLibrary planned{2};
  ThroughPlain plain;
  load(job, planned.device);
  planned.enter(0);
  threads_pair(planned, pairs / 8);
  threads_pair(plain, pairs / 8);
  Row row;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    row.planned.push_back(threads_pair(planned, pairs));
    row.plain.push_back(threads_pair(plain, pairs));
  }
  memplan_read_statistics(planned.device, &row.statistics);
  return row;
}

void measure(const std::string& driver, const std::string& path, std::int64_t rounds) {
  memplan_use_driver(driver.c_str());
  Job job = read_job(path);
  fill(job);
  const Row one = one_thread(job, rounds);
  const Row many = many_threads(200'000);
  std::printf("{");
  print("one_thread", one);
  std::printf(", ");
  print("four_threads", many);
  std::printf("}\n");
}

}  // namespace
}  // namespace memplan::planned

int main(int count, char** words) {
  if (count != 4) {
    std::fprintf(stderr, "usage: %s DRIVER JOB ROUNDS\n", words[0]);
    return 2;
  }
  try {
    memplan::planned::measure(words[1], words[2], std::atoll(words[3]));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}

// Random events through the replay, with every kind of setting; built with sanitizers it looks for
// memory errors, and in any build it checks the sums against each other.
//
//   memplan_stress [ROUNDS [SEED]]
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "caching/replay.hpp"

using namespace memplan::caching;

namespace {

using Random = std::mt19937_64;

std::int64_t pick(Random& random, std::initializer_list<std::int64_t> values) {
  return *(values.begin() + random() % values.size());
}

Settings random_settings(Random& random) {
  Settings settings;
  settings.expandable_segments = random() % 2 == 0;
  settings.large_segment_size = pick(random, {20 * kMiB, 12 * kMiB, 32 * kMiB});
  settings.max_split_size = pick(random, {kUnlimited, 32 * kMiB, 64 * kMiB});
  settings.garbage_collection_threshold = random() % 2 == 0 ? 0.0 : 0.5;
  settings.capacity_bytes = pick(random, {kUnlimited, 64 * kMiB, 512 * kMiB, 4096 * kMiB});
  settings.allowed_bytes = pick(random, {kUnlimited, 256 * kMiB});
  settings.throw_on_cudamalloc_oom = random() % 8 == 0;
  settings.reserve_bytes = pick(random, {std::int64_t{1} << 42, 1024 * kMiB, 40 * kMiB});
  for (auto& divisions : settings.roundup_divisions) divisions = pick(random, {0, 0, 1, 2, 8});
  return settings;
}

struct Columns {
  std::vector<std::uint8_t> kind;
  std::vector<std::int64_t> storage, bytes, least, aux;
  std::vector<std::int32_t> stream;
  std::vector<std::int16_t> device;

  void add(EventKind k, std::int64_t s, std::int64_t b, std::int32_t st, std::int64_t a) {
    kind.push_back(static_cast<std::uint8_t>(k));
    storage.push_back(s);
    bytes.push_back(b);
    least.push_back(storage.size() % 3 == 0 ? b / 2 : b);
    stream.push_back(st);
    device.push_back(0);
    aux.push_back(a);
  }
};

std::int64_t random_size(Random& random) {
  const std::int64_t scale = std::int64_t{1} << (random() % 27);
  return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(2 * scale));
}

// Frees may name anything, twice or never begun: a trace from outside may be wrong.
Columns random_events(Random& random, std::int64_t resident, std::int64_t& storages) {
  Columns columns;
  storages = resident;
  const std::size_t count = 50 + random() % 2000;
  for (std::size_t i = 0; i < count; ++i) {
    const auto stream = static_cast<std::int32_t>(random() % 3);
    const std::int64_t any =
        storages == 0 ? -1
                      : static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(storages));
    const auto event = static_cast<std::int64_t>(random() % 4);
    switch (random() % 16) {
      case 0: case 1: case 2: case 3: case 4: case 5:
        columns.add(EventKind::kAlloc, storages++, random_size(random), stream, -1);
        break;
      case 6: case 7: case 8: case 9: columns.add(EventKind::kFree, any, 0, 0, -1); break;
      case 10: columns.add(EventKind::kFreeCompleted, random() % 4 ? -1 : any, 0, 0, -1); break;
      case 11: columns.add(EventKind::kRecordStream, any, 0, stream, -1); break;
      case 12: columns.add(EventKind::kEventRecord, -1, 0, stream, event); break;
      case 13: columns.add(EventKind::kEventWait, -1, 0, stream, event); break;
      case 14: columns.add(EventKind::kSynchronize, -1, 0, stream - 1, -1); break;
      default:
        if (random() % 8 == 0) columns.add(EventKind::kEmptyCache, -1, 0, 0, -1);
        const auto kind = random() % 2 ? EventKind::kSegmentAlloc : EventKind::kSegmentMap;
        columns.add(kind, -1, 20 * kMiB, stream, std::int64_t(random() % 64) * 20 * kMiB);
    }
  }
  return columns;
}

// Segments with alternating blocks; every other block that is in use has a storage.
std::int64_t random_start(Random& random, ReplayInput& input) {
  std::int64_t resident = 0;
  std::int64_t address = std::int64_t{1} << 40;
  const std::size_t segments = random() % 6;
  for (std::size_t row = 0; row < segments; ++row) {
    const bool small = random() % 2 == 0;
    const std::int64_t bytes = small ? 2 * kMiB : pick(random, {20 * kMiB, 40 * kMiB, 60 * kMiB});
    input.segments.push_back({address, bytes, static_cast<std::int32_t>(random() % 2), small,
                              random() % 2 == 0});
    address += bytes + pick(random, {0, 2 * kMiB, 20 * kMiB, 4096 * kMiB});
    bool in_use = random() % 2 == 0;
    for (std::int64_t left = bytes; left > 0; in_use = !in_use) {
      const std::int64_t size = random() % 3 == 0 ? left : std::min(left, bytes / 4);
      if (in_use) {
        input.residents.push_back({static_cast<std::int64_t>(input.blocks.size()), resident++});
      }
      input.blocks.push_back({static_cast<std::int64_t>(row), size, size, in_use});
      left -= size;
    }
  }
  return resident;
}

bool consistent(const ReplaySummary& summary, const ReplayColumns& out) {
  std::int64_t reserved = summary.start.reserved;
  std::size_t next = 0;
  for (std::size_t i = 0; i < out.reserved.size(); ++i) {
    for (; next < summary.segment_events.size() &&
           summary.segment_events[next].event == static_cast<std::int64_t>(i);
         ++next) {
      const SegmentEvent& event = summary.segment_events[next];
      const bool grows =
          event.action == SegmentAction::kAlloc || event.action == SegmentAction::kMap;
      reserved += grows ? event.bytes : -event.bytes;
    }
    if (out.reserved[i] != reserved || out.allocated[i] < 0 ||
        out.allocated[i] > out.active[i] || out.active[i] > out.reserved[i] ||
        out.requested[i] > out.active[i]) {
      return false;
    }
  }
  return next == summary.segment_events.size();
}

}  // namespace

int main(int argc, char** argv) {
  const long rounds = argc > 1 ? std::atol(argv[1]) : 500;
  const auto seed = static_cast<std::uint64_t>(argc > 2 ? std::atol(argv[2]) : 0);
  for (long round = 0; round < rounds; ++round) {
    Random random(seed + static_cast<std::uint64_t>(round));
    const Settings settings = random_settings(random);
    ReplayInput input{};
    input.reuse_early = random() % 2 == 0;
    const Columns columns = random_events(random, random_start(random, input), input.storages);
    input.events = {columns.kind,   columns.storage, columns.bytes, columns.least,
                    columns.stream, columns.device,  columns.aux};
    const std::size_t size = columns.kind.size();
    std::vector<std::int64_t> requested(size), allocated(size), active(size), reserved(size),
        address(size);
    const ReplayColumns out = {requested, allocated, active, reserved, address};
    if (!consistent(replay(settings, input, out), out)) {
      std::fprintf(stderr, "round %ld: the sums disagree\n", round);
      return 1;
    }
  }
  std::printf("%ld rounds\n", rounds);
  return 0;
}

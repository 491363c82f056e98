// Random jobs on random plans, against a model that knows nothing of cells: memplan_arena_stress
// [OPERATIONS [SEED]]. The plans are not even consistent: places overlap, lifetimes are made up. Still
// no byte may be given out twice, every block must lie in the arena, and what passes from one stream
// to another must be waited for.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "planned/arena.hpp"
#include "planned/plan_columns.hpp"

using namespace memplan::planned;

namespace {

using Random = std::mt19937_64;

std::int64_t draw(Random& random, std::int64_t low, std::int64_t high) {
  return std::uniform_int_distribution<std::int64_t>(low, high - 1)(random);
}

[[noreturn]] void fail(const std::string& what, std::uint64_t seed) {
  std::fprintf(stderr, "seed %llu: %s\n", static_cast<unsigned long long>(seed), what.c_str());
  std::exit(1);
}

PlanColumns random_plan(Random& random) {
  PlanColumns plan;
  plan.space_ranges = {0};
  plan.arena_bytes = kBlock * draw(random, 1, 400);
  plan.phases = draw(random, 0, 4);
  plan.start = draw(random, 0, 200);
  plan.clock = draw(random, 1, 400);
  const std::int64_t requests = draw(random, 1, 120), streams = draw(random, 1, 4);
  plan.setup = draw(random, 0, requests);
  for (std::int64_t spaces = draw(random, 0, 4); spaces > 0; --spaces) {
    plan.space_lower.push_back(0);
    plan.space_upper.push_back(plan.clock);
    for (std::int64_t at = 0; at < plan.arena_bytes;) {
      const std::int64_t from = at + kBlock * draw(random, 0, 40), to = from + draw(random, 1, 9999);
      if (to > plan.arena_bytes) break;
      plan.ranges.insert(plan.ranges.end(), {from, to});
      at = rounded(to);
    }
    plan.space_ranges.push_back(static_cast<std::int64_t>(plan.ranges.size()) / 2);
  }
  const auto spaces = static_cast<std::int64_t>(plan.space_lower.size());
  const std::int64_t sizes = draw(random, 1, 8), unit = draw(random, 1, 6000);
  for (std::int64_t at = 0; at < requests; ++at) {
    const std::int64_t first = at < plan.setup ? 0 : plan.start;
    const std::int64_t lower = first + draw(random, 0, at < plan.setup ? plan.start + 1 : plan.clock);
    const std::int64_t bytes = unit * draw(random, 1, sizes + 1);
    const std::int64_t places = (plan.arena_bytes - rounded(bytes)) / kBlock;
    const bool dynamic = spaces > 0 && draw(random, 0, 5) == 0;
    plan.bytes.push_back(bytes);
    plan.stream.push_back(draw(random, 0, 4) == 0 ? draw(random, 0, streams) * 7 : 0);
    plan.phase.push_back(at < plan.setup ? -1 : draw(random, -1, plan.phases));
    plan.lower.push_back(std::min(lower, plan.start + plan.clock - 1));
    plan.upper.push_back(plan.lower.back() + draw(random, 1, plan.clock + 1));
    plan.offset.push_back(dynamic || places < 0 ? -1 : kBlock * draw(random, 0, places + 1));
    plan.space.push_back(dynamic ? draw(random, 0, spaces) : -1);
  }
  return plan;
}

// What the arena must not do.
class Model {
 public:
  Model(std::int64_t arena, std::uint64_t seed)
      : seed_(seed), arena_(arena), clocks_(kStreams, std::vector<std::int64_t>(kStreams, 0)) {}

  void place(const Arena& arena, const Place& place, std::int64_t bytes, std::int32_t stream) {
    for (const std::int32_t slot : arena.after()) wait(stream, slot);
    if (place.offset < 0) return;
    const std::int64_t end = place.offset + rounded(bytes);
    if (place.offset % kBlock != 0 || end > arena_) fail("a place outside the arena", seed_);
    const auto behind = live_.lower_bound(place.offset);
    if (behind != live_.end() && behind->first < end) fail("bytes given out twice", seed_);
    if (behind != live_.begin() && std::prev(behind)->second.end > place.offset) {
      fail("bytes given out twice", seed_);
    }
    for (std::int64_t at = place.offset; at < end; at += kBlock) {
      const auto found = used_.find(at);
      if (found == used_.end() || found->second.stream == stream) continue;
      if (clocks_[index(stream)][index(found->second.stream)] < found->second.time) {
        fail("bytes of another stream not waited for", seed_);
      }
    }
    live_[place.offset] = {end, stream};
  }

  void release(Arena& arena, std::int64_t offset) {
    const auto [end, stream] = live_.at(offset);
    live_.erase(offset);
    auto& own = clocks_[index(stream)];
    const std::int64_t time = ++own[index(stream)];
    for (std::int64_t at = offset; at < end; at += kBlock) used_[at] = {stream, time};
    if (!arena.release(offset)) return;
    slots_.push_back(own);
    arena.released_in(offset, static_cast<std::int32_t>(slots_.size()) - 1);
  }

  bool in_use(std::int64_t lower, std::int64_t upper) const {
    const auto behind = live_.lower_bound(upper);
    return behind != live_.begin() && std::prev(behind)->second.end > lower;
  }

 private:
  static constexpr std::size_t kStreams = 4;
  struct Block {
    std::int64_t end;
    std::int32_t stream;
  };
  struct Use {
    std::int32_t stream;
    std::int64_t time;  // On its stream's own clock.
  };

  static std::size_t index(std::int32_t stream) { return static_cast<std::size_t>(stream); }

  void wait(std::int32_t stream, std::int32_t slot) {
    const auto& done = slot < 0 ? clocks_.at(index(-1 - slot)) : slots_.at(index(slot));
    auto& mine = clocks_[index(stream)];
    for (std::size_t at = 0; at < kStreams; ++at) mine[at] = std::max(mine[at], done[at]);
  }

  std::uint64_t seed_;
  std::int64_t arena_;
  std::map<std::int64_t, Block> live_;
  std::map<std::int64_t, Use> used_;                  // By block of 512 bytes: its last release.
  std::vector<std::vector<std::int64_t>> clocks_;     // What each stream knows done of each.
  std::vector<std::vector<std::int64_t>> slots_;
};

// A job that follows the plan at times, and at times does as it likes.
void run(std::int64_t operations, std::uint64_t seed, Counters& sum) {
  Random random(seed);
  const PlanColumns made = random_plan(random);
  const memplan_plan columns = made.columns();
  const bool in_round = draw(random, 0, 4) == 0;
  Arena arena(make_plan(columns), in_round);
  Model model(made.arena_bytes, seed);
  const std::int64_t strange = draw(random, 0, 40), held = draw(random, 1, 40);
  const std::int64_t streams = draw(random, 1, 5);
  std::int64_t at = in_round ? made.setup : 0;
  std::vector<std::int64_t> live;
  for (; operations > 0; --operations) {
    const std::int64_t what = draw(random, 0, 100);
    if (what < 45 || live.empty()) {
      std::int64_t bytes = made.bytes[static_cast<std::size_t>(at)];
      if (draw(random, 0, 100) < strange) bytes = draw(random, 1, 20'000);
      const bool own = draw(random, 0, 10) != 0;
      const auto stream = static_cast<std::int32_t>(own ? 0 : draw(random, 0, streams));
      if (draw(random, 0, 100) >= strange / 2) ++at;
      if (at == columns.requests) at = made.setup;
      Place place = arena.place(bytes, stream);
      if (place.offset < 0 && draw(random, 0, 2) == 0) place = arena.squeeze_in(bytes, stream);
      model.place(arena, place, bytes, stream);
      if ((place.offset < 0) != (place.kind == Kind::kNone)) fail("a kind without a place", seed);
      if (place.offset >= 0) live.push_back(place.offset);
    } else if (what < 90 || static_cast<std::int64_t>(live.size()) > held) {
      const auto which = static_cast<std::size_t>(draw(random, 0, static_cast<std::int64_t>(live.size())));
      model.release(arena, live[which]);
      live.erase(live.begin() + static_cast<std::ptrdiff_t>(which));
    } else if (what < 96) {
      const std::int64_t lower = draw(random, 0, made.arena_bytes), upper = lower + draw(random, 1, 9000);
      if (!arena.in_use(lower, upper) && model.in_use(lower, upper)) fail("free, but in use", seed);
      if (live.empty() && arena.in_use(lower, upper)) fail("in use, with nothing alive", seed);
    } else if (what < 98) {
      arena.enter_phase(static_cast<std::int32_t>(draw(random, -1, made.phases + 1)));
    } else {
      const std::int64_t offset = draw(random, 0, made.arena_bytes);
      const bool known = std::find(live.begin(), live.end(), offset) != live.end();
      if (!known && arena.release(offset)) fail("something released that was not there", seed);
    }
  }
  for (const std::int64_t offset : live) model.release(arena, offset);
  if (arena.in_use(0, made.arena_bytes)) fail("in use after everything was released", seed);
  sum.hits += arena.counters().hits;
  sum.dynamic += arena.counters().dynamic;
  sum.adopted += arena.counters().adopted;
  sum.misses += arena.counters().misses;
  sum.resyncs += arena.counters().resyncs;
}

// A plan with any one number changed is refused or served, never worse.
void damage(std::uint64_t seed, std::int64_t& refused) {
  Random random(seed);
  PlanColumns made = random_plan(random);
  std::vector<std::int64_t>* columns[] = {&made.bytes, &made.stream, &made.phase, &made.lower,
                                          &made.upper, &made.offset, &made.space,
                                          &made.space_ranges, &made.ranges};
  auto& column = *columns[draw(random, 0, 9)];
  if (column.empty()) return;
  const std::int64_t values[] = {-1, -2, 0, 1, std::int64_t{1} << 62, -(std::int64_t{1} << 62),
                                 made.arena_bytes, made.arena_bytes + 1, draw(random, 0, 100'000)};
  auto& value = column[static_cast<std::size_t>(draw(random, 0, static_cast<std::int64_t>(column.size())))];
  // The last of `space_ranges` is a length that the caller vouches for.
  if (&column == &made.space_ranges && &value == &column.back()) return;
  value = values[draw(random, 0, 9)];
  try {
    Arena arena(make_plan(made.columns()), false);
    Model model(made.arena_bytes, seed);
    for (int at = 0; at < 200; ++at) {
      const std::int64_t bytes = draw(random, 1, 20'000);
      model.place(arena, arena.place(bytes, 0), bytes, 0);
    }
  } catch (const std::invalid_argument&) {
    ++refused;
  }
}

}  // namespace

int main(int count, char** arguments) {
  const std::int64_t operations = count > 1 ? std::atoll(arguments[1]) : 2'000'000;
  std::uint64_t seed = count > 2 ? static_cast<std::uint64_t>(std::atoll(arguments[2])) : 1;
  Counters sum;
  std::int64_t refused = 0, jobs = 0;
  for (std::int64_t done = 0; done < operations; done += 2000, ++seed, ++jobs) {
    run(2000, seed, sum);
    damage(seed, refused);
  }
  std::printf("%lld jobs: %lld hits, %lld dynamic, %lld adopted, %lld misses, %lld resyncs; "
              "%lld damaged plans refused\n",
              static_cast<long long>(jobs), static_cast<long long>(sum.hits),
              static_cast<long long>(sum.dynamic), static_cast<long long>(sum.adopted),
              static_cast<long long>(sum.misses), static_cast<long long>(sum.resyncs),
              static_cast<long long>(refused));
  return sum.hits > 0 && sum.dynamic > 0 && sum.adopted > 0 && sum.resyncs > 0 ? 0 : 1;
}

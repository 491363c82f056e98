#include "planned/plan.hpp"

#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <unordered_map>

namespace memplan::planned {
namespace {

constexpr std::int64_t kMaxRequests = 4'000'000;
constexpr std::int64_t kMaxStreams = 1 << 14;
constexpr std::int64_t kMaxSpaces = 1 << 16;
constexpr std::int64_t kMaxBytes = std::int64_t{1} << 48;
constexpr std::int64_t kMaxArena = kBlock << 32;  // `Plan::Start` counts blocks in 32 bits.
constexpr std::int64_t kMaxClock = std::int64_t{1} << 40;

[[noreturn]] void refuse(const std::string& reason) { throw std::invalid_argument(reason); }

// Unless low <= value < high.
void check(const char* what, std::int64_t at, std::int64_t value, std::int64_t low,
           std::int64_t high) {
  if (low <= value && value < high) return;
  refuse(std::string(what) + " of request " + std::to_string(at) + " is " + std::to_string(value) +
         ", outside [" + std::to_string(low) + ", " + std::to_string(high) + ")");
}

void check(const char* what, std::int64_t value, std::int64_t low, std::int64_t high) {
  if (low <= value && value < high) return;
  refuse(std::string("the plan's ") + what + " is " + std::to_string(value) + ", outside [" +
         std::to_string(low) + ", " + std::to_string(high) + ")");
}

std::uint64_t mixed(std::uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9U;
  return value ^ (value >> 31);
}

}  // namespace

Plan::Plan(const memplan_plan& columns) {
  read(columns);
  read_spaces(columns);
  number_streams(columns);
  cut();
  find_starts();
  find_shared();
  find_moments();
  find_phases();
  find_grams();
}

void Plan::read(const memplan_plan& c) {
  if (c.abi != MEMPLAN_ABI) refuse("the plan is laid out for another version of the library");
  check("number of requests", c.requests, 1, kMaxRequests + 1);
  check("setup", c.setup, 0, c.requests);
  check("start", c.start, 0, kMaxClock);
  check("clock", c.clock, 1, kMaxClock);
  check("arena", c.arena_bytes, kBlock, kMaxArena);
  check("number of phases", c.phases, 0, kMaxRequests);
  check("number of spaces", c.spaces, 0, kMaxSpaces + 1);
  const std::int64_t end = c.start + c.clock;
  rows_.reserve(static_cast<std::size_t>(c.requests));
  lives_.reserve(static_cast<std::size_t>(c.requests));
  for (std::int64_t at = 0; at < c.requests; ++at) {
    check("bytes", at, c.bytes[at], 0, kMaxBytes);
    check("stream", at, c.stream[at], 0, std::int64_t{1} << 31);
    check("phase", at, c.phase[at], -1, c.phases);
    check("lower", at, c.lower[at], 0, end);
    check("upper", at, c.upper[at], c.lower[at] + 1, end + c.clock + 1);
    check("offset", at, c.offset[at], -1, c.arena_bytes);
    check("space", at, c.space[at], -1, c.spaces);
    const bool placed = c.offset[at] >= 0 && c.bytes[at] > 0;
    if (placed) {
      if (c.offset[at] % kBlock != 0) refuse("request " + std::to_string(at) + " is unaligned");
      check("end", at, c.offset[at] + rounded(c.bytes[at]), 0, c.arena_bytes + 1);
    }
    Row row{};
    row.bytes = c.bytes[at];
    row.offset = placed ? c.offset[at] : -1;
    row.space = static_cast<std::int32_t>(c.space[at]);
    rows_.push_back(row);
    lives_.push_back({c.lower[at], c.upper[at], 0, static_cast<std::int32_t>(c.phase[at])});
  }
  setup_ = static_cast<std::int32_t>(c.setup);
  start_ = c.start;
  clock_ = c.clock;
  edges_ = {0, c.arena_bytes / kBlock * kBlock};
  begins_.resize(static_cast<std::size_t>(c.phases));
}

void Plan::read_spaces(const memplan_plan& c) {
  space_starts_ = {0};
  for (std::int64_t space = 0; space < c.spaces; ++space) {
    const std::int64_t from = c.space_ranges[space], to = c.space_ranges[space + 1];
    const std::string name = "space " + std::to_string(space);
    if (from != static_cast<std::int64_t>(ranges_.size()) || to < from ||
        to > 2 * kMaxRequests) {
      refuse(name + " has ranges [" + std::to_string(from) + ", " + std::to_string(to) + ")");
    }
    std::int64_t last = 0;
    for (std::int64_t at = from; at < to; ++at) {
      const std::int64_t lower = c.ranges[2 * at], upper = c.ranges[2 * at + 1];
      if (lower < last || upper <= lower || upper > c.arena_bytes || lower % kBlock != 0) {
        refuse(name + " is no part of the arena");
      }
      ranges_.emplace_back(lower, std::max(lower, upper / kBlock * kBlock));
      last = upper;
    }
    space_starts_.push_back(ranges_.size());
  }
}

// Streams of the trace by the order of their first use, as those of the job will be.
void Plan::number_streams(const memplan_plan& c) {
  std::unordered_map<std::int64_t, std::int16_t> number{{0, std::int16_t{0}}};
  for (std::int64_t at = 0; at < c.requests; ++at) {
    const auto next = static_cast<std::int16_t>(number.size());
    rows_[static_cast<std::size_t>(at)].stream = number.emplace(c.stream[at], next).first->second;
    check("number of streams", static_cast<std::int64_t>(number.size()), 0, kMaxStreams + 1);
  }
}

void Plan::cut() {
  for (const Row& row : rows_) {
    if (row.offset < 0) continue;
    edges_.push_back(row.offset);
    edges_.push_back(row.offset + rounded(row.bytes));
  }
  for (const auto& [lower, upper] : ranges_) {
    edges_.push_back(lower);
    edges_.push_back(upper);
  }
  std::sort(edges_.begin(), edges_.end());
  edges_.erase(std::unique(edges_.begin(), edges_.end()), edges_.end());
  round_cells_ = Cells(cells());
  for (std::int32_t at = 0; at < size(); ++at) {
    Row& row = rows_[static_cast<std::size_t>(at)];
    row.first = row.last = -1;
    if (row.offset < 0) continue;
    row.first = cell_from(row.offset);
    row.last = cell_from(row.offset + rounded(row.bytes));
    if (at >= setup_) round_cells_.add(row.first, row.last);
  }
  for (const auto& [lower, upper] : ranges_) {
    space_cells_.emplace_back(cell_from(lower), cell_from(upper));
  }
}

void Plan::find_starts() {
  std::vector<std::int32_t> firsts;
  for (const Row& row : rows_) {
    if (row.first >= 0) firsts.push_back(row.first);
  }
  std::sort(firsts.begin(), firsts.end());
  firsts.erase(std::unique(firsts.begin(), firsts.end()), firsts.end());
  by_offset_.resize(std::bit_ceil(2 * firsts.size() + 2));
  shift_ = 64 - std::countr_zero(by_offset_.size());
  for (const std::int32_t cell : firsts) {
    const auto key = static_cast<std::uint32_t>(edge(cell) / kBlock);
    std::size_t slot = home(key);
    while (by_offset_[slot].cell >= 0) slot = (slot + 1) & (by_offset_.size() - 1);
    by_offset_[slot] = {key, cell};
  }
}

// A row is shared where places of two streams or more cover one of its cells.
void Plan::find_shared() {
  std::vector<std::int32_t> order;
  for (std::int32_t at = 0; at < size(); ++at) {
    if (row(at).first >= 0) order.push_back(at);
  }
  std::sort(order.begin(), order.end(), [this](std::int32_t a, std::int32_t b) {
    return std::pair(row(a).stream, row(a).first) < std::pair(row(b).stream, row(b).first);
  });
  // How many streams cover a cell: each adds one where the union of its places begins.
  std::vector<std::int32_t> change(edges_.size(), 0);
  std::int32_t stream = -1, until = 0;
  for (const std::int32_t at : order) {
    const Row& one = row(at);
    if (one.stream != stream) until = 0;
    stream = one.stream;
    if (one.last <= until) continue;
    ++change[static_cast<std::size_t>(std::max(one.first, until))];
    --change[static_cast<std::size_t>(one.last)];
    until = one.last;
  }
  std::vector<std::int32_t> several(edges_.size() + 1, 0);
  std::int32_t streams = 0;
  for (std::size_t cell = 0; cell < edges_.size(); ++cell) {
    streams += change[cell];
    several[cell + 1] = several[cell] + (streams > 1 ? 1 : 0);
  }
  for (const std::int32_t at : order) {
    Row& one = rows_[static_cast<std::size_t>(at)];
    one.shared = several[static_cast<std::size_t>(one.last)] >
                 several[static_cast<std::size_t>(one.first)];
  }
}

void Plan::find_moments() {
  std::int64_t latest = 0;
  for (std::int32_t at = 0; at < size(); ++at) {
    Life& one = lives_[static_cast<std::size_t>(at)];
    one.moment = latest = std::max(latest, one.lower);
    sizes_.push_back(row(at).bytes);
    if (at >= setup_ && row(at).first >= 0 && one.lower < latest) early_.push_back(at);
  }
  std::sort(sizes_.begin(), sizes_.end());
  sizes_.erase(std::unique(sizes_.begin(), sizes_.end()), sizes_.end());
}

void Plan::find_phases() {
  for (std::int32_t at = 0; at < size(); ++at) {
    const std::int32_t phase = life(at).phase;
    if (at > 0 && life(at - 1).phase == phase) continue;
    if (at > 0) boundaries_.push_back(at);
    if (phase >= 0) begins_[static_cast<std::size_t>(phase)].push_back(at);
  }
}

void Plan::find_grams() {
  for (std::int32_t at = 0; at < size(); ++at) {
    std::uint64_t marks[kGram];
    std::int32_t here = at;
    bool fixed = true;
    for (int step = 0; step < kGram; ++step, here = next(here)) {
      fixed = fixed && row(here).space < 0;
      marks[step] = mark(row(here).bytes, row(here).stream);
    }
    if (fixed) grams_.emplace_back(join(marks), here);
  }
  std::sort(grams_.begin(), grams_.end());
}

std::int64_t Plan::phase_end(std::int32_t at) const {
  const auto found = std::upper_bound(boundaries_.begin(), boundaries_.end(), at);
  return found == boundaries_.end() ? end() : moment(*found);
}

std::int32_t Plan::cell_of(std::int64_t offset) const {
  const auto found = std::upper_bound(edges_.begin(), edges_.end(), offset);
  return static_cast<std::int32_t>(found - edges_.begin()) - 1;
}

std::int32_t Plan::cell_from(std::int64_t offset) const {
  const auto found = std::lower_bound(edges_.begin(), edges_.end(), offset);
  return static_cast<std::int32_t>(found - edges_.begin());
}

std::span<const CellRange> Plan::space(std::int32_t number) const {
  const auto at = static_cast<std::size_t>(number);
  const std::size_t from = space_starts_[at];
  return std::span(space_cells_).subspan(from, space_starts_[at + 1] - from);
}

std::span<const std::int32_t> Plan::begins(std::int32_t phase) const {
  if (phase < 0 || static_cast<std::size_t>(phase) >= begins_.size()) return {};
  return begins_[static_cast<std::size_t>(phase)];
}

bool Plan::knows(std::int64_t bytes) const {
  return std::binary_search(sizes_.begin(), sizes_.end(), bytes);
}

std::uint64_t Plan::mark(std::int64_t bytes, std::int32_t stream) {
  return mixed(static_cast<std::uint64_t>(bytes) ^ (static_cast<std::uint64_t>(stream) << 48));
}

std::uint64_t Plan::join(const std::uint64_t (&marks)[kGram]) {
  std::uint64_t value = 0;
  for (const std::uint64_t one : marks) value = (value ^ one) * 0x9e3779b97f4a7c15U + 1;
  return value;
}

std::span<const std::pair<std::uint64_t, std::int32_t>> Plan::after(std::uint64_t gram) const {
  const auto less = [](const auto& entry, std::uint64_t key) { return entry.first < key; };
  const auto more = [](std::uint64_t key, const auto& entry) { return key < entry.first; };
  const auto from = std::lower_bound(grams_.begin(), grams_.end(), gram, less);
  const auto to = std::upper_bound(from, grams_.end(), gram, more);
  return {from, to};
}

}  // namespace memplan::planned

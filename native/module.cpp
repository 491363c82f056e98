#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <unordered_set>
#include <utility>
#include <vector>

#include "caching/replay.hpp"
#include "columns.hpp"
#include "order/bindings.hpp"
#include "order/min_cut_bindings.hpp"
#include "packing/bindings.hpp"
#include "planned/bindings.hpp"
#include "recompute/bindings.hpp"
#include "sandbox/file_calls.hpp"

namespace nb = nanobind;
using namespace memplan::caching;

namespace {

using memplan::Column;
using memplan::OutColumn;
using memplan::view;

std::int64_t field(const nb::dict& values, const char* name) {
  return nb::cast<std::int64_t>(values[name]);
}

Settings settings_from(const nb::dict& values) {
  Settings settings;
  settings.expandable_segments = nb::cast<bool>(values["expandable_segments"]);
  settings.throw_on_cudamalloc_oom = nb::cast<bool>(values["throw_on_cudamalloc_oom"]);
  settings.max_split_size = field(values, "max_split_size");
  settings.max_non_split_rounding = field(values, "max_non_split_rounding");
  settings.large_segment_size = field(values, "large_segment_size");
  settings.garbage_collection_threshold =
      nb::cast<double>(values["garbage_collection_threshold"]);
  settings.allowed_bytes = field(values, "allowed_bytes");
  settings.capacity_bytes = field(values, "capacity_bytes");
  settings.reserve_bytes = field(values, "reserve_bytes");
  std::size_t i = 0;
  for (nb::handle divisions : nb::cast<nb::tuple>(values["roundup_divisions"])) {
    settings.roundup_divisions.at(i++) = nb::cast<std::int64_t>(divisions);
  }
  return settings;
}

// Rows of (address, bytes, stream, small, expandable).
std::vector<InitialSegment> segments_from(const Column<std::int64_t>& rows) {
  std::vector<InitialSegment> segments;
  const std::span<const std::int64_t> values = view(rows);
  if (values.size() % 5 != 0) throw std::invalid_argument("segments have five fields");
  for (std::size_t i = 0; i < values.size(); i += 5) {
    segments.push_back({values[i], values[i + 1], static_cast<std::int32_t>(values[i + 2]),
                        values[i + 3] != 0, values[i + 4] != 0});
  }
  return segments;
}

// Rows of (segment, bytes, requested, in use, storage or -1).
void blocks_from(const Column<std::int64_t>& rows, ReplayInput& input) {
  const std::span<const std::int64_t> values = view(rows);
  if (values.size() % 5 != 0) throw std::invalid_argument("blocks have five fields");
  for (std::size_t i = 0; i < values.size(); i += 5) {
    const auto row = static_cast<std::int64_t>(input.blocks.size());
    const std::int64_t segment = values[i];
    const std::int64_t storage = values[i + 4];
    if (segment < 0 || segment >= static_cast<std::int64_t>(input.segments.size()) ||
        values[i + 1] <= 0 || storage >= input.storages) {
      throw std::invalid_argument("an initial block is out of range");
    }
    input.blocks.push_back({segment, values[i + 1], values[i + 2], values[i + 3] != 0});
    if (storage >= 0) input.residents.push_back({row, storage});
  }
}

nb::dict statistics_dict(const Statistics& statistics) {
  nb::dict result;
  result["requested"] = statistics.requested;
  result["allocated"] = statistics.allocated;
  result["active"] = statistics.active;
  result["reserved"] = statistics.reserved;
  return result;
}

nb::dict summary_dict(const ReplaySummary& summary) {
  nb::list segment_events;
  for (const SegmentEvent& event : summary.segment_events) {
    segment_events.append(nb::make_tuple(event.event, static_cast<int>(event.action), event.bytes,
                                         event.stream, event.address));
  }
  nb::dict result;
  result["start"] = statistics_dict(summary.start);
  result["num_alloc_retries"] = summary.end.alloc_retries;
  result["oom_event"] = summary.oom_event;
  result["oom_bytes"] = summary.oom_bytes;
  result["unknown_frees"] = summary.unknown_frees;
  result["segment_events"] = std::move(segment_events);
  return result;
}

nb::dict replay_columns(const Column<std::uint8_t>& kind, const Column<std::int64_t>& storage,
                        const Column<std::int64_t>& bytes, const Column<std::int64_t>& least,
                        const Column<std::int32_t>& stream,
                        const Column<std::int16_t>& device, const Column<std::int64_t>& aux,
                        const Column<std::int64_t>& segments, const Column<std::int64_t>& blocks,
                        const nb::dict& settings_values, std::int64_t storages,
                        std::int16_t device_index, bool reuse_early,
                        const OutColumn<std::int64_t>& requested,
                        const OutColumn<std::int64_t>& allocated,
                        const OutColumn<std::int64_t>& active,
                        const OutColumn<std::int64_t>& reserved,
                        const OutColumn<std::int64_t>& address) {
  const std::size_t size = kind.shape(0);
  const Settings settings = settings_from(settings_values);
  ReplayInput input;
  input.events = {view(kind, size),   view(storage, size), view(bytes, size), view(least, size),
                  view(stream, size), view(device, size),  view(aux, size)};
  input.storages = storages;
  input.device = device_index;
  input.reuse_early = reuse_early;
  input.segments = segments_from(segments);
  blocks_from(blocks, input);
  for (const std::int64_t generation : input.events.storage) {
    if (generation >= storages) throw std::invalid_argument("a storage is out of range");
  }
  const ReplayColumns out = {view(requested, size), view(allocated, size), view(active, size),
                             view(reserved, size), view(address, size)};
  ReplaySummary summary;
  {
    nb::gil_scoped_release unlocked;
    summary = replay(settings, input, out);
  }
  return summary_dict(summary);
}

// The numbers of the modules that have one of these objects as an attribute. Each capture looks
// through hundreds of thousands of attributes: nothing here creates an object for one.
std::vector<std::size_t> modules_with(const nb::list& modules, const nb::dict& ids) {
  std::unordered_set<std::uintptr_t> wanted;
  std::bitset<1 << 14> filter;  // nearly all are told by it alone
  const auto bit = [&](std::uintptr_t id) { return id / alignof(std::max_align_t) % filter.size(); };
  for (auto [key, _] : ids) {
    const auto id = nb::cast<std::uintptr_t>(key);
    wanted.insert(id);
    filter.set(bit(id));
  }
  std::vector<std::size_t> found;
  for (std::size_t i = 0; i < modules.size(); ++i) {
    const nb::object module = modules[i];
    if (!PyModule_Check(module.ptr())) continue;
    Py_ssize_t at = 0;
    PyObject* value = nullptr;
    while (PyDict_Next(PyModule_GetDict(module.ptr()), &at, nullptr, &value)) {
      const auto id = reinterpret_cast<std::uintptr_t>(value);
      if (filter.test(bit(id)) && wanted.contains(id)) {
        found.push_back(i);
        break;
      }
    }
  }
  return found;
}

}  // namespace

NB_MODULE(_native, m) {
  using namespace nb::literals;
  m.doc() = "memplan's native code.";
  m.def("replay", &replay_columns, "kind"_a, "storage"_a, "bytes"_a, "least"_a, "stream"_a, "device"_a,
        "aux"_a, "segments"_a, "blocks"_a, "settings"_a, "storages"_a, "device_index"_a,
        "reuse_early"_a, "requested"_a, "allocated"_a, "active"_a, "reserved"_a, "address"_a,
        "Replay the events of one device through the caching allocator's rules.");
  m.def("modules_with", &modules_with, "modules"_a, "ids"_a,
        "The numbers of the modules that have one of these objects, by their ids, as an attribute.");
  memplan::order::bind(m);
  memplan::order::bind_min_cut(m);
  memplan::sandbox::bind_file_calls(m);
  memplan::packing::bind(m);
  memplan::planned::bind(m);
  memplan::recompute::bind(m);
}

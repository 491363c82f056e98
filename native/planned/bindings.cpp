#include "planned/bindings.hpp"

#include <cstddef>
#include <stdexcept>

#include "columns.hpp"
#include "planned/arena.hpp"

namespace nb = nanobind;

namespace memplan::planned {
namespace {

using Column = memplan::Column<std::int64_t>;
using OutColumn = memplan::OutColumn<std::int64_t>;

// Numbers as in bench.layout.serve.
enum Action : std::int64_t { kRequest = 0, kRelease = 1, kPhase = 2 };

// Never converted: the plan points into the array, and a copy would not outlive this call.
const std::int64_t* column(const nb::dict& columns, const char* name, std::size_t length) {
  return view(nb::cast<Column>(columns[name], false), length).data();
}

memplan_plan plan_of(const nb::dict& numbers, const nb::dict& columns) {
  const auto number = [&numbers](const char* name) {
    return nb::cast<std::int64_t>(numbers[name]);
  };
  memplan_plan plan{};
  plan.abi = MEMPLAN_ABI;
  plan.requests = number("requests");
  plan.setup = number("setup");
  plan.start = number("start");
  plan.clock = number("clock");
  plan.arena_bytes = number("arena_bytes");
  plan.phases = number("phases");
  plan.spaces = number("spaces");
  if (plan.requests < 0 || plan.spaces < 0) throw std::invalid_argument("a negative length");
  const auto rows = static_cast<std::size_t>(plan.requests);
  plan.bytes = column(columns, "bytes", rows);
  plan.stream = column(columns, "stream", rows);
  plan.phase = column(columns, "phase", rows);
  plan.lower = column(columns, "lower", rows);
  plan.upper = column(columns, "upper", rows);
  plan.offset = column(columns, "offset", rows);
  plan.space = column(columns, "space", rows);
  const auto spaces = static_cast<std::size_t>(plan.spaces);
  plan.space_lower = column(columns, "space_lower", spaces);
  plan.space_upper = column(columns, "space_upper", spaces);
  plan.space_ranges = column(columns, "space_ranges", spaces + 1);
  const std::int64_t ranges = plan.space_ranges[spaces];
  if (ranges < 0) throw std::invalid_argument("a negative length");
  plan.ranges = column(columns, "ranges", 2 * static_cast<std::size_t>(ranges));
  return plan;
}

nb::dict serve(const nb::dict& numbers, const nb::dict& columns, const Column& action,
               const Column& value, const Column& stream, const OutColumn& offset,
               const OutColumn& kind) {
  const std::size_t count = action.shape(0);
  if (value.shape(0) != count || stream.shape(0) != count || offset.shape(0) != count ||
      kind.shape(0) != count) {
    throw std::invalid_argument("columns differ in length");
  }
  Arena arena(make_plan(plan_of(numbers, columns)), false);
  for (std::size_t at = 0; at < count; ++at) {
    offset.data()[at] = -1;
    kind.data()[at] = static_cast<std::int64_t>(Kind::kNone);
    const std::int64_t number = value.data()[at];
    if (action.data()[at] == kRequest) {
      const Place place = arena.place(number, static_cast<std::int32_t>(stream.data()[at]));
      offset.data()[at] = place.offset;
      kind.data()[at] = static_cast<std::int64_t>(place.kind);
    } else if (action.data()[at] == kRelease) {
      if (number < 0 || static_cast<std::size_t>(number) >= at) {
        throw std::invalid_argument("a release before its request");
      }
      if (offset.data()[number] >= 0) arena.release(offset.data()[number]);
    } else {
      arena.enter_phase(static_cast<std::int32_t>(number));
    }
  }
  const Counters& counters = arena.counters();
  nb::dict found;
  found["hits"] = counters.hits;
  found["dynamic"] = counters.dynamic;
  found["adopted"] = counters.adopted;
  found["misses"] = counters.misses;
  found["resyncs"] = counters.resyncs;
  return found;
}

}  // namespace

void bind(nb::module_& m) {
  using namespace nb::literals;
  m.def("serve", &serve, "numbers"_a, "columns"_a, "action"_a, "value"_a, "stream"_a, "offset"_a,
        "kind"_a, "Run the requests of a job through the arena of a planned allocator.");
}

}  // namespace memplan::planned

#include "order/bindings.hpp"

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "columns.hpp"
#include "order/graph.hpp"
#include "order/search.hpp"
#include "watch.hpp"

namespace nb = nanobind;

namespace memplan::order {
namespace {

using Column = memplan::Column<std::int64_t>;
using OutColumn = memplan::OutColumn<std::int64_t>;
using Flags = memplan::Column<std::uint8_t>;

nb::tuple search(const Column& scratch, const Column& before_start, const Column& before,
                 const Column& bytes, const Column& maker, const Flags& lasts,
                 const Column& users_start, const Column& users, std::int64_t base_bytes,
                 const OutColumn& order, std::int64_t floor, std::int32_t nodes, double seconds,
                 const Flag& cancel) {
  const Graph graph(Columns{view(scratch), view(before_start), view(before), view(bytes),
                            view(maker), view(lasts), view(users_start), view(users), base_bytes});
  std::vector<Op> start;
  for (const std::int64_t op : view(order)) {
    if (op < 0 || op >= graph.ops()) throw std::invalid_argument("an operator does not exist");
    start.push_back(static_cast<Op>(op));
  }
  SearchSettings settings;
  settings.floor = floor;
  settings.nodes = nodes;
  SearchResult found;
  {
    const nb::gil_scoped_release released;
    const Watch watch(seconds, cancel.data());
    found = Search(graph, settings, watch.stopped()).run(std::move(start));
  }
  std::copy(found.order.begin(), found.order.end(), order.data());
  return nb::make_tuple(found.peak, found.bound);
}

}  // namespace

void bind(nb::module_& m) {
  using namespace nb::literals;
  m.def("improve_order", &search, "scratch"_a, "before_start"_a, "before"_a, "bytes"_a, "maker"_a,
        "lasts"_a, "users_start"_a, "users"_a, "base_bytes"_a, nb::arg("order").noconvert(),
        "floor"_a, "nodes"_a, "seconds"_a, nb::arg("cancel").noconvert());
}

}  // namespace memplan::order

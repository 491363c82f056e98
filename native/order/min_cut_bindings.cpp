#include "order/min_cut_bindings.hpp"

#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "columns.hpp"
#include "order/min_cut.hpp"
#include "order/narrow.hpp"
#include "watch.hpp"

namespace nb = nanobind;

namespace memplan::order {
namespace {

using Column = memplan::Column<std::int64_t>;
using OutColumn = memplan::OutColumn<std::int64_t>;
using Flags = memplan::Column<std::uint8_t>;

// Minimum cuts of one graph; calls from several threads are for the caller to keep apart.
class Cuts {
 public:
  Cuts(const Column& scratch, const Column& before_start, const Column& before,
       const Column& bytes, const Column& maker, const Flags& lasts, const Column& users_start,
       const Column& users, std::int64_t base_bytes)
      : graph_(Columns{view(scratch), view(before_start), view(before), view(bytes), view(maker),
                       view(lasts), view(users_start), view(users), base_bytes}),
        cut_(graph_),
        before_(before.shape(0)),
        users_(users.shape(0)) {}

  std::int64_t flow(std::int64_t op, const Column& also_before, const Column& also_after,
                    const OutColumn& share, const OutColumn& rest, const OutColumn& back) {
    if (share.shape(0) != users_ || back.shape(0) != before_ ||
        rest.shape(0) != static_cast<std::size_t>(graph_.values())) {
      throw std::invalid_argument("columns differ in length");
    }
    const FlowColumns columns{view(share), view(rest), view(back)};
    for (const std::span<std::int64_t> column : {columns.share, columns.rest, columns.back}) {
      std::fill(column.begin(), column.end(), 0);
    }
    const Op known = checked(op);
    const std::vector<Op> earlier = all_checked(also_before);
    const std::vector<Op> later = all_checked(also_after);
    const nb::gil_scoped_release released;
    const std::int64_t cut = cut_.solve(known, earlier, later);
    cut_.flow(columns);
    return graph_.base + graph_.transient[static_cast<std::size_t>(known)] + cut;
  }

  std::int64_t least(const Column& ops, const Column& held, std::int64_t floor, double seconds,
                     const Flag& cancel, const OutColumn& bytes) {
    if (ops.shape(0) != held.shape(0) || ops.shape(0) != bytes.shape(0)) {
      throw std::invalid_argument("columns differ in length");
    }
    const std::vector<Op> known = all_checked(ops);
    const nb::gil_scoped_release released;
    const Watch watch(seconds, cancel.data());
    std::size_t count = 0;
    for (; count < known.size() && held.data()[count] > floor && !watch.stopped(); ++count) {
      const Op op = known[count];
      bytes.data()[count] =
          graph_.base + graph_.transient[static_cast<std::size_t>(op)] + cut_.solve(op);
      floor = std::max(floor, bytes.data()[count]);
    }
    return static_cast<std::int64_t>(count);
  }

  nb::tuple narrow(std::int64_t op, std::int64_t budget, double seconds, const Flag& cancel) {
    const Op known = checked(op);
    bool possible = true;
    std::vector<std::int64_t> before, after;
    {
      const nb::gil_scoped_release released;
      const Watch watch(seconds, cancel.data());
      Narrowing narrowing(graph_, cut_, watch.stopped());
      possible = narrowing.run(known, budget);
      before.assign(narrowing.before().begin(), narrowing.before().end());
      after.assign(narrowing.after().begin(), narrowing.after().end());
    }
    return nb::make_tuple(possible, before, after);
  }

 private:
  Op checked(std::int64_t op) const {
    if (op < 0 || op >= graph_.ops()) throw std::invalid_argument("an operator does not exist");
    return static_cast<Op>(op);
  }

  std::vector<Op> all_checked(const Column& ops) const {
    std::vector<Op> known;
    for (const std::int64_t op : view(ops)) known.push_back(checked(op));
    return known;
  }

  Graph graph_;
  MinCut cut_;
  std::size_t before_;
  std::size_t users_;
};

}  // namespace

void bind_min_cut(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<Cuts>(m, "OrderCuts", "Least bytes alive while an operator runs.")
      .def(nb::init<const Column&, const Column&, const Column&, const Column&, const Column&,
                    const Flags&, const Column&, const Column&, std::int64_t>(),
           "scratch"_a, "before_start"_a, "before"_a, "bytes"_a, "maker"_a, "lasts"_a,
           "users_start"_a, "users"_a, "base_bytes"_a)
      .def("flow", &Cuts::flow, "op"_a, "also_before"_a, "also_after"_a,
           nb::arg("share").noconvert(), nb::arg("rest").noconvert(),
           nb::arg("back").noconvert())
      .def("least", &Cuts::least, "ops"_a, "held"_a, "floor"_a, "seconds"_a,
           nb::arg("cancel").noconvert(), nb::arg("bytes").noconvert())
      .def("narrow", &Cuts::narrow, "op"_a, "budget"_a, "seconds"_a,
           nb::arg("cancel").noconvert());
}

}  // namespace memplan::order

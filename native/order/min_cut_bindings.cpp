#include "order/min_cut_bindings.hpp"

#include <nanobind/ndarray.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>

#include "order/min_cut.hpp"

namespace nb = nanobind;

namespace memplan::order {
namespace {

using Column = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using OutColumn = nb::ndarray<std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Flags = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Flag = nb::ndarray<std::uint8_t, nb::shape<1>, nb::c_contig, nb::device::cpu>;

template <typename T>
auto view(const T& column) {
  return std::span(column.data(), column.shape(0));
}

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

  std::int64_t flow(std::int64_t op, const OutColumn& share, const OutColumn& rest,
                    const OutColumn& back) {
    if (share.shape(0) != users_ || back.shape(0) != before_ ||
        rest.shape(0) != static_cast<std::size_t>(graph_.values())) {
      throw std::invalid_argument("columns differ in length");
    }
    const FlowColumns columns{view(share), view(rest), view(back)};
    for (const std::span<std::int64_t> column : {columns.share, columns.rest, columns.back}) {
      std::fill(column.begin(), column.end(), 0);
    }
    const Op known = checked(op);
    const nb::gil_scoped_release released;
    const std::int64_t cut = cut_.solve(known);
    cut_.flow(columns);
    return graph_.base + graph_.transient[static_cast<std::size_t>(known)] + cut;
  }

  nb::tuple best(const Column& ops, const Column& held, std::int64_t floor, double seconds,
                 const Flag& cancel) {
    if (ops.shape(0) != held.shape(0)) throw std::invalid_argument("columns differ in length");
    for (const std::int64_t op : view(ops)) checked(op);
    const std::uint8_t* flag = cancel.data();
    using Clock = std::chrono::steady_clock;
    const auto end = Clock::now() + std::chrono::duration<double>(std::clamp(seconds, 0.0, 1e9));
    const auto stop = [&] {
      return __atomic_load_n(flag, __ATOMIC_RELAXED) != 0 || Clock::now() >= end;
    };
    BestCut found;
    {
      const nb::gil_scoped_release released;
      found = best_cut(graph_, cut_, view(ops), view(held), floor, stop);
    }
    return nb::make_tuple(found.bytes, found.op, found.cuts);
  }

 private:
  Op checked(std::int64_t op) const {
    if (op < 0 || op >= graph_.ops()) throw std::invalid_argument("an operator does not exist");
    return static_cast<Op>(op);
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
      .def("flow", &Cuts::flow, "op"_a, nb::arg("share").noconvert(), nb::arg("rest").noconvert(),
           nb::arg("back").noconvert())
      .def("best", &Cuts::best, "ops"_a, "held"_a, "floor"_a, "seconds"_a,
           nb::arg("cancel").noconvert());
}

}  // namespace memplan::order

#include "packing/bindings.hpp"

#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>

#include "columns.hpp"
#include "packing/solve.hpp"

namespace nb = nanobind;

namespace memplan::packing {
namespace {

using Column = memplan::Column<std::int64_t>;
using OutColumn = memplan::OutColumn<std::int64_t>;

nb::dict pack(const Column& lower, const Column& upper, const Column& size,
              const Column& alignment, const Column& fixed, const Column& twin,
              std::int64_t capacity, double within, double seconds, std::uint64_t seed, int threads,
              const Flag& cancel, const OutColumn& offsets) {
  const Columns columns{view(lower), view(upper), view(size), view(alignment), view(fixed),
                        view(twin)};
  if (offsets.shape(0) != lower.shape(0)) throw std::invalid_argument("columns differ in length");
  Question question;
  question.capacity = capacity;
  question.within = within;
  question.seconds = seconds;
  question.seed = seed;
  question.threads = threads;
  question.cancel = cancel.data();
  Answer answer;
  {
    const nb::gil_scoped_release released;
    answer = solve(columns, question);
  }
  std::copy(answer.offsets.begin(), answer.offsets.end(), offsets.data());
  nb::dict result;
  result["infeasible"] = answer.status == Status::kInfeasible;
  result["height_bytes"] = answer.height;
  result["bound_bytes"] = answer.bound;
  result["witness"] = answer.witness;
  return result;
}

}  // namespace

void bind(nb::module_& m) {
  m.def("pack", &pack, nb::arg("lower"), nb::arg("upper"), nb::arg("size"), nb::arg("alignment"),
        nb::arg("fixed"), nb::arg("twin"), nb::arg("capacity"), nb::arg("within"), nb::arg("seconds"),
        nb::arg("seed"), nb::arg("threads"), nb::arg("cancel").noconvert(), nb::arg("offsets").noconvert());
}

}  // namespace memplan::packing

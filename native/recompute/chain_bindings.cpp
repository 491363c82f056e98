#include <cstdint>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "columns.hpp"
#include "recompute/bindings.hpp"
#include "recompute/chain.hpp"

namespace nb = nanobind;

namespace memplan::recompute {
namespace {

using Column = memplan::Column<std::int64_t>;

nb::tuple least_peak(const Column& keep, const Column& kept, const Column& unsaved,
                     const Column& backward, const Column& forward,
                     const Column& replay, const Column& tail,
                     const Column& end, const Column& entry, const Column& first,
                     const Column& last) {
  const std::size_t size = keep.shape(0);
  if (size == 0) throw std::invalid_argument("a chain has at least one layer");
  const ChainColumns columns = {view(keep, size),     view(kept, size),    view(unsaved, size),
                                view(backward, size), view(forward, size), view(replay, size),
                                view(tail, size),     view(end, size),     view(entry, size),
                                view(first, size),    view(last, size)};
  std::int64_t before = 0;
  for (std::size_t row = 0; row < size; ++row) {
    const std::int64_t layer = columns.tail[row];
    if (layer < before || layer > static_cast<std::int64_t>(row) + 1) {
      throw std::invalid_argument("a replay ends in a layer that does not exist");
    }
    before = layer;
  }
  ChainOptimum optimum;
  {
    nb::gil_scoped_release unlocked;
    optimum = least_peak_chain(columns);
  }
  const std::size_t found = optimum.checkpoints.size();
  auto* moved = new std::vector<std::int64_t>(std::move(optimum.checkpoints));
  const nb::capsule owner(moved, [](void* p) noexcept {
    delete static_cast<std::vector<std::int64_t>*>(p);
  });
  return nb::make_tuple(
      optimum.peak_bytes,
      nb::ndarray<nb::numpy, std::int64_t, nb::ndim<1>>(moved->data(), {found}, owner));
}

}  // namespace

void bind_chain(nb::module_& m) {
  using namespace nb::literals;
  m.def("least_peak_chain", &least_peak, "keep"_a, "kept"_a, "unsaved"_a, "backward"_a,
        "forward"_a, "replay"_a, "tail"_a, "end"_a, "entry"_a, "first"_a, "last"_a,
        "The checkpoints of a chain with the least peak.");
}

}  // namespace memplan::recompute

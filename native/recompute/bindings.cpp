#include "recompute/bindings.hpp"

#include <nanobind/ndarray.h>

#include <mutex>

#include "recompute/model.hpp"

namespace nb = nanobind;

namespace memplan::recompute {
namespace {

template <typename T>
using Column = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using OutColumn = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <typename T>
std::span<const T> view(const Column<T>& column) {
  return {column.data(), column.shape(0)};
}

template <typename T>
void same_size(const T& column, std::size_t size) {
  if (column.shape(0) != size) throw std::invalid_argument("columns differ in length");
}

// A model that calls from several threads take in turn.
class SharedModel {
 public:
  SharedModel(const Column<std::int64_t>& reads_start, const Column<std::int64_t>& reads,
              const Column<std::int64_t>& writes_start, const Column<std::int64_t>& writes,
              const Column<double>& seconds, const Column<std::uint8_t>& replayable,
              const Column<std::int64_t>& bytes, const Column<std::int64_t>& alloc,
              const Column<std::int64_t>& free, const Column<std::uint8_t>& droppable,
              std::int64_t forward_ops)
      : model_(Columns{view(reads_start), view(reads), view(writes_start), view(writes),
                       view(seconds), view(replayable), view(bytes), view(alloc), view(free),
                       view(droppable), forward_ops}) {}

  nb::tuple evaluate(const Column<std::int32_t>& group, const Column<std::uint8_t>& held,
                     const OutColumn<std::int64_t>& row_bytes,
                     const OutColumn<double>& group_seconds) {
    same_size(group, model_.values());
    same_size(held, model_.values());
    same_size(row_bytes, model_.rows());
    same_size(group_seconds, model_.values());
    Outcome outcome;
    {
      nb::gil_scoped_release unlocked;
      const std::lock_guard<std::mutex> lock(mutex_);
      outcome = model_.evaluate(view(group), view(held), {row_bytes.data(), row_bytes.shape(0)},
                                {group_seconds.data(), group_seconds.shape(0)});
    }
    return nb::make_tuple(outcome.peak_bytes, outcome.peak_row, outcome.seconds,
                          outcome.replayed_ops);
  }

 private:
  std::mutex mutex_;
  Model model_;
};

}  // namespace

void bind(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<SharedModel>(m, "RecomputeModel",
                          "What dropping and recomputing values does to a step.")
      .def(nb::init<const Column<std::int64_t>&, const Column<std::int64_t>&,
                    const Column<std::int64_t>&, const Column<std::int64_t>&,
                    const Column<double>&, const Column<std::uint8_t>&,
                    const Column<std::int64_t>&, const Column<std::int64_t>&,
                    const Column<std::int64_t>&, const Column<std::uint8_t>&, std::int64_t>(),
           "reads_start"_a, "reads"_a, "writes_start"_a, "writes"_a, "seconds"_a, "replayable"_a,
           "bytes"_a, "alloc"_a, "free"_a, "droppable"_a, "forward_ops"_a)
      .def("evaluate", &SharedModel::evaluate, "group"_a, "held"_a, "row_bytes"_a,
           "group_seconds"_a);
}

}  // namespace memplan::recompute

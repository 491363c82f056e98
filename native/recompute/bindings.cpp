#include "recompute/bindings.hpp"

#include <atomic>
#include <mutex>
#include <stdexcept>
#include <utility>
#include <vector>

#include "columns.hpp"
#include "recompute/model.hpp"
#include "recompute/search.hpp"
#include "recompute/segments.hpp"

namespace nb = nanobind;

namespace memplan::recompute {
namespace {

// A model that calls from several threads take in turn.
class SharedModel {
 public:
  SharedModel(const Column<std::int64_t>& reads_start, const Column<std::int64_t>& reads,
              const Column<std::int64_t>& writes_start, const Column<std::int64_t>& writes,
              const Column<double>& seconds, const Column<std::uint8_t>& replayable,
              const Column<std::int64_t>& bytes, const Column<std::int64_t>& alloc,
              const Column<std::int64_t>& free, const Column<std::uint8_t>& droppable,
              std::int64_t forward_ops, const Column<std::int64_t>& background,
              std::int64_t others)
      : model_(Columns{view(reads_start), view(reads), view(writes_start), view(writes),
                       view(seconds), view(replayable), view(bytes), view(alloc), view(free),
                       view(droppable), forward_ops, view(background), others}) {}

  nb::tuple evaluate(const Column<std::int32_t>& group, const Column<std::uint8_t>& held,
                     const OutColumn<std::int64_t>& row_bytes,
                     const OutColumn<double>& group_seconds) {
    const std::size_t values = model_.values();
    Outcome outcome;
    {
      nb::gil_scoped_release unlocked;
      const std::lock_guard<std::mutex> lock(mutex_);
      outcome = model_.evaluate(view(group, values), view(held, values),
                                view(row_bytes, model_.rows()), view(group_seconds, values));
    }
    return nb::make_tuple(outcome.peak_bytes, outcome.peak_row, outcome.seconds,
                          outcome.replayed_ops);
  }

  nb::tuple search(const Column<std::int32_t>& drops, const Column<std::int32_t>& holds,
                   const OutColumn<std::int32_t>& group, const OutColumn<std::uint8_t>& held,
                   std::int64_t budget_bytes, double byte_price, double start_temperature,
                   double end_temperature, std::int64_t iterations, std::uint64_t seed,
                   double deadline_seconds) {
    const std::size_t values = model_.values();
    for (const Column<std::int32_t>* names : {&drops, &holds}) {
      for (const std::int32_t value : view(*names)) {
        if (value < 0 || static_cast<std::size_t>(value) >= values) {
          throw std::invalid_argument("a value does not exist");
        }
      }
    }
    const SearchSettings settings{budget_bytes,    byte_price, start_temperature,
                                  end_temperature, iterations, seed,
                                  deadline_seconds};
    Outcome outcome;
    {
      nb::gil_scoped_release unlocked;
      const std::lock_guard<std::mutex> lock(mutex_);
      outcome = recompute::search(model_, settings, view(drops), view(holds), view(group, values),
                                  view(held, values));
    }
    return nb::make_tuple(outcome.peak_bytes, outcome.peak_row, outcome.seconds,
                          outcome.replayed_ops);
  }

 private:
  std::mutex mutex_;
  Model model_;
};

template <typename T>
std::vector<T> copy(const Column<T>& column) {
  return {column.data(), column.data() + column.shape(0)};
}

void make_segments(SegmentTable* self, std::int64_t levels,
                   const Column<std::int64_t>& option_start, const Column<std::int64_t>& between,
                   const Column<std::int64_t>& need, const Column<double>& option_seconds,
                   const Column<std::int64_t>& crossing, const Column<std::int64_t>& through,
                   const Column<double>& seconds) {
  SegmentChain chain{levels,         copy(option_start), copy(between), copy(need),
                     copy(option_seconds), copy(crossing),     copy(through), copy(seconds)};
  nb::gil_scoped_release unlocked;
  new (self) SegmentTable(std::move(chain));
}

}  // namespace

void bind(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<SharedModel>(m, "RecomputeModel",
                          "What dropping and recomputing values does to a step.")
      .def(nb::init<const Column<std::int64_t>&, const Column<std::int64_t>&,
                    const Column<std::int64_t>&, const Column<std::int64_t>&,
                    const Column<double>&, const Column<std::uint8_t>&,
                    const Column<std::int64_t>&, const Column<std::int64_t>&,
                    const Column<std::int64_t>&, const Column<std::uint8_t>&, std::int64_t,
                    const Column<std::int64_t>&, std::int64_t>(),
           "reads_start"_a, "reads"_a, "writes_start"_a, "writes"_a, "seconds"_a, "replayable"_a,
           "bytes"_a, "alloc"_a, "free"_a, "droppable"_a, "forward_ops"_a,
           "background"_a, "others"_a)
      .def("evaluate", &SharedModel::evaluate, "group"_a, "held"_a, "row_bytes"_a,
           "group_seconds"_a)
      .def("search", &SharedModel::search, "drops"_a, "holds"_a, "group"_a, "held"_a,
           "budget_bytes"_a, "byte_price"_a, "start_temperature"_a, "end_temperature"_a,
           "iterations"_a, "seed"_a, "deadline_seconds"_a);
  nb::class_<SegmentTable>(m, "SegmentTable", "Which segments of a chain to replay as a whole.")
      .def("__init__", &make_segments, "levels"_a, "option_start"_a, "between"_a, "need"_a,
           "option_seconds"_a, "crossing"_a, "through"_a, "seconds"_a)
      .def(
          "best",
          [](const SegmentTable& table, std::int64_t start, std::int64_t stop,
             std::int64_t level) {
            const SegmentChoice choice = table.best(start, stop, level);
            return nb::make_tuple(choice.cost, choice.option, choice.middle);
          },
          "start"_a, "stop"_a, "level"_a);
}

}  // namespace memplan::recompute

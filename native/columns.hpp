#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>

namespace memplan {

// NumPy arrays as the Python module's functions take them.
template <typename T>
using Column = nanobind::ndarray<const T, nanobind::ndim<1>, nanobind::c_contig,
                                 nanobind::device::cpu>;
// One that is written. Arguments must be `noconvert`, or a copy would be.
template <typename T>
using OutColumn =
    nanobind::ndarray<T, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
// A byte that another thread sets.
using Flag = nanobind::ndarray<std::uint8_t, nanobind::shape<1>, nanobind::c_contig,
                               nanobind::device::cpu>;

template <typename T>
auto view(const T& column) {
  return std::span(column.data(), column.shape(0));
}

// Throws std::invalid_argument for a column of another length.
template <typename T>
auto view(const T& column, std::size_t size) {
  if (column.shape(0) != size) throw std::invalid_argument("columns differ in length");
  return view(column);
}

}  // namespace memplan

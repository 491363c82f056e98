#pragma once

#include <nanobind/nanobind.h>

namespace memplan::packing {

void bind(nanobind::module_& m);

}  // namespace memplan::packing

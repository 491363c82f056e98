#pragma once

#include <nanobind/nanobind.h>

namespace memplan::recompute {

void bind(nanobind::module_& m);

}  // namespace memplan::recompute

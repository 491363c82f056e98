#pragma once

#include <nanobind/nanobind.h>

namespace memplan::order {

void bind_min_cut(nanobind::module_& m);

}  // namespace memplan::order

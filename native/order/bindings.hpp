#pragma once

#include <nanobind/nanobind.h>

namespace memplan::order {

void bind(nanobind::module_& m);

}  // namespace memplan::order

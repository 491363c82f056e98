#pragma once

#include <nanobind/nanobind.h>

namespace memplan::planned {

void bind(nanobind::module_& m);

}  // namespace memplan::planned

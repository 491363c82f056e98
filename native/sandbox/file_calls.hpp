// Sends what native libraries of this process do with files through Python: see `linkage.hpp`.
#pragma once

#include <nanobind/nanobind.h>

namespace memplan::sandbox {

void bind_file_calls(nanobind::module_& module);

}  // namespace memplan::sandbox

// Which functions the libraries of this process call.
//
// Each loaded object calls other libraries through a table of its own, which the dynamic linker has
// filled (System V ABI, "Global Offset Table").
#pragma once

#include <string_view>
#include <unordered_map>

namespace memplan::sandbox {

// Functions in place of those of the C library, by their names.
using Functions = std::unordered_map<std::string_view, void*>;

// Writes `functions` into the tables of all objects that were loaded since it was last called. Not
// into those of the C library and of this module, and into Python's for `dlopen` alone: Python sees
// to its own calls itself. Does nothing while another thread does it.
void write_functions(const Functions& functions);

// Writes back what the tables held before.
void restore_functions();

}  // namespace memplan::sandbox

// What operators.rs hands to operators.cpp.

#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {
// One argument as the description has it. The schema decides what it becomes.
struct PrecastArgument {
  const char* name;
  // As in `Value` of operators.rs.
  int32_t kind;
  const int64_t* ints;
  size_t n_ints;
  const double* floats;
  size_t n_floats;
  const char* text;
};
}

// The calls of operators.rs in operators.cpp.

#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {
// One argument of a description. The schema decides its type.
struct PrecastArgument {
  const char* name;
  // As in `OperatorArgument` of operators.rs.
  int32_t kind;
  const int64_t* ints;
  size_t n_ints;
  const double* floats;
  size_t n_floats;
  const char* text;
};
}

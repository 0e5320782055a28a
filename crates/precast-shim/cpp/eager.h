// The calls of calls.rs in eager.cpp.

#pragma once

#include <cstddef>
#include <cstdint>

namespace precast {
struct Fixed;
}

extern "C" {
// One argument of a call: one value or a list of them, each fixed or the number of an earlier one.
struct PrecastGiven {
  const char* name;
  int32_t is_list;
  const precast::Fixed* items;
  size_t n;
};
}

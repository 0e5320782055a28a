// Ends a driver of the sanitizers with exit code 3, the place and the words when a condition does not hold.
#pragma once

#include <cstdio>
#include <cstdlib>

#define MUST(what)                                                    \
  do {                                                                \
    if (!(what)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #what); \
      std::_Exit(3);                                                  \
    }                                                                 \
  } while (0)

// What a driver for the sanitizers ends at when something is not as it must be: exit code 3, with the place and the words.
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

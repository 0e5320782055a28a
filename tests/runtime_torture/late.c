// Preloaded into a process: keeps it alive for a while after libtorch's destructors have run, so that a call which would
// meet them does. It is initialised before libtorch, so what it registers runs afterwards.

#include <stdlib.h>
#include <unistd.h>

static void late(void) { usleep(50000); }
__attribute__((constructor(101))) static void early(void) { atexit(late); }

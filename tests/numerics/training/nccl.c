// The functions of NCCL that a trainer calls, over host memory and for two devices. Compiled with -DFAILS, reductions fail.
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 1024, INT64 = 4, FLOAT32 = 7 };

struct call {
  void *data;
  size_t count;
  int dtype, adds;
} calls[2][MOST];
static size_t made[2];
static int ranks[2] = {0, 1}, in_group;

const char *ncclGetErrorString(int code) { return code ? "internal error" : "no error"; }
const char *ncclGetLastError(void *comm) { return comm ? 0 : "the fake refuses it\n"; }

int ncclCommInitAll(void **comms, int n, const int *devices) {
  for (int i = 0; i < n; i++) comms[i] = &ranks[devices[i]];
  return n == 2 ? 0 : 3;
}

int ncclCommDestroy(void *comm) { return comm == &ranks[0] || comm == &ranks[1] ? 0 : 3; }

int ncclGroupStart(void) {
  if (in_group++) abort();
  return 0;
}

static int add(const void *in, void *out, size_t count, int dtype, int adds, void *comm) {
  int rank = *(int *)comm;
  if (!in_group || in != out || made[rank] == MOST) abort();
  calls[rank][made[rank]++] = (struct call){out, count, dtype, adds};
  return 0;
}

int ncclReduce(const void *in, void *out, size_t count, int dtype, int op, int root, void *comm, void *stream) {
#ifdef FAILS
  return 3;
#endif
  return op || root || stream ? 4 : add(in, out, count, dtype, 1, comm);
}

int ncclBroadcast(const void *in, void *out, size_t count, int dtype, int root, void *comm, void *stream) {
  return root || stream || dtype != 1 ? 4 : add(in, out, count, dtype, 0, comm);
}

int ncclGroupEnd(void) {
  if (!in_group-- || made[0] != made[1]) abort();
  for (size_t i = 0; i < made[0]; i++) {
    struct call a = calls[0][i], b = calls[1][i];
    if (a.count != b.count || a.dtype != b.dtype || (a.adds && a.dtype != INT64 && a.dtype != FLOAT32)) abort();
    if (!a.adds) memcpy(b.data, a.data, a.count);
    for (size_t j = 0; a.adds && j < a.count; j++) {
      if (a.dtype == INT64) ((int64_t *)a.data)[j] += ((int64_t *)b.data)[j];
      else ((float *)a.data)[j] += ((float *)b.data)[j];
    }
  }
  made[0] = made[1] = 0;
  return 0;
}

/*
 * Calls of the C interface on a CUDA stream of the caller: inputs in the device's memory, one stream a thread of work.
 *
 *     streams LIBTORCH STORE LIBCUDART       a store with examples/double for CUDA; what it prints ends with `ok`
 */
#include <precast.h>

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

enum { ROWS = 16, COLUMNS = 8, CALLS = 200, STREAMS = 3, TO_DEVICE = 1 };

#define CHECK(what) \
  if (!(what)) { \
    fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #what); \
    exit(1); \
  }

static void ok(precast_error *error) {
  if (error == NULL) return;
  fprintf(stderr, "error: %s\nhint: %s\n", error->message, error->hint);
  exit(1);
}

static void *function(void *library, const char *name) {
  void *found = dlsym(library, name);
  if (found == NULL) fprintf(stderr, "%s\n", dlerror());
  CHECK(found != NULL);
  return found;
}

int main(int argc, char **argv) {
  CHECK(argc == 4);
  void *cuda = dlopen(argv[3], RTLD_NOW | RTLD_GLOBAL);
  CHECK(cuda != NULL);
  int (*create)(void **) = (int (*)(void **))function(cuda, "cudaStreamCreate");
  int (*allocate)(void **, size_t) = (int (*)(void **, size_t))function(cuda, "cudaMalloc");
  int (*copy)(void *, const void *, size_t, int, void *) =
      (int (*)(void *, const void *, size_t, int, void *))function(cuda, "cudaMemcpyAsync");
  int (*wait)(void *) = (int (*)(void *))function(cuda, "cudaStreamSynchronize");

  ok(precast_libtorch(argv[1], 1));
  DLDevice device = {kDLCUDA, 0};
  precast_options options = {.size = sizeof options, .devices = &device, .device_count = 1};
  precast_runtime *runtime;
  precast_model *model;
  ok(precast_runtime_open(argv[2], &options, &runtime));
  ok(precast_model_load(runtime, "double", &model));

  void *streams[STREAMS], *memory[STREAMS];
  for (int i = 0; i < STREAMS; i++) {
    CHECK(create(&streams[i]) == 0);
    CHECK(allocate(&memory[i], sizeof(float[ROWS][COLUMNS])) == 0);
  }
  int64_t shape[] = {ROWS, COLUMNS};
  float ones[ROWS][COLUMNS], got[ROWS][COLUMNS], first[ROWS][COLUMNS];
  for (int call = 0; call < CALLS; call++) {
    int of = call % STREAMS;
    /* The input is written on the stream, and the call follows on it: nothing waits in between. */
    for (int i = 0; i < ROWS * COLUMNS; i++) ones[i / COLUMNS][i % COLUMNS] = (float)(call % 7);
    CHECK(copy(memory[of], ones, sizeof ones, TO_DEVICE, streams[of]) == 0);
    DLTensor x = {
        .data = memory[of],
        .device = device,
        .ndim = 2,
        .dtype = {kDLFloat, 32, 1},
        .shape = shape,
    };
    const DLTensor *inputs[] = {&x};
    precast_outputs *outputs, *again;
    ok(precast_model_run_on(model, "forward", inputs, NULL, 1, streams[of], &outputs));
    CHECK(wait(streams[of]) == 0);
    ok(precast_outputs_copy(outputs, 0, got, sizeof got));
    ok(precast_model_run(model, "forward", inputs, NULL, 1, &again));
    ok(precast_outputs_copy(again, 0, first, sizeof first));
    for (int i = 0; i < ROWS * COLUMNS; i++) CHECK(got[i / COLUMNS][i % COLUMNS] == first[i / COLUMNS][i % COLUMNS]);
    precast_outputs_free(outputs);
    precast_outputs_free(again);
  }
  printf("double of 0 to 6 on %d streams, %d calls: ok\n", STREAMS, CALLS);
  precast_model_free(model);
  precast_runtime_free(runtime);
  return 0;
}

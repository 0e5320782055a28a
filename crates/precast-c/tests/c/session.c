/* Sessions: states, positions, forks, and calls that fail. */
#include "check.h"

static DLTensor tensor(void *data, int ndim, int64_t *shape, DLDataTypeCode code, int bits) {
  DLTensor made = {
      .data = data,
      .device = {kDLCPU, 0},
      .ndim = ndim,
      .dtype = {(uint8_t)code, (uint8_t)bits, 1},
      .shape = shape,
  };
  return made;
}

/* Runs `total` on {1, 2} and checks the answer, which is x and the sum of all x. */
static void total(precast_session *session, float first, float second) {
  float data[] = {1, 2}, got[2];
  int64_t shape[] = {1, 2};
  DLTensor x = tensor(data, 2, shape, kDLFloat, 32);
  const DLTensor *inputs[] = {&x};
  const char *names[] = {"x"};
  precast_outputs *outputs;
  OK(precast_session_run(session, "total", inputs, names, 1, &outputs));
  OK(precast_outputs_copy(outputs, 0, got, sizeof got));
  CHECK(got[0] == first && got[1] == second);
  precast_outputs_free(outputs);
}

/* Checks the only output, int64 numbers, and frees the outputs. */
static void numbers(precast_outputs *outputs, int count, const int64_t *want) {
  int64_t got[8];
  CHECK(strcmp(precast_outputs_name(outputs, 0), "sum") == 0);
  CHECK(precast_outputs_tensor(outputs, 0)->shape[1] == count);
  OK(precast_outputs_copy(outputs, 0, got, sizeof got[0] * (size_t)count));
  CHECK(memcmp(got, want, sizeof got[0] * (size_t)count) == 0);
  precast_outputs_free(outputs);
}

/* Copies a file without its last `cut` bytes. */
static void rewrite(const char *from, const char *to, long cut) {
  char bytes[4096];
  FILE *file = fopen(from, "rb");
  CHECK(file != NULL);
  long size = (long)fread(bytes, 1, sizeof bytes, file);
  CHECK(fclose(file) == 0 && size > cut && size < (long)sizeof bytes);
  file = fopen(to, "wb");
  CHECK(file != NULL && fwrite(bytes, 1, (size_t)(size - cut), file) == (size_t)(size - cut));
  CHECK(fclose(file) == 0);
}

/* Saves and loads states: a file that is none changes nothing. */
static void files(precast_model *model) {
  const char *file = "c-session.safetensors", *broken = "c-broken.safetensors";
  precast_session *one;
  OK(precast_session_open(model, &one));
  total(one, 2, 4);
  OK(precast_session_save(one, file));
  total(one, 3, 6);
  OK(precast_session_load(one, file));
  total(one, 3, 6);
  rewrite(file, broken, 3);
  FAILS(PRECAST_CODE_BAD_ARGUMENT, broken, precast_session_load(one, broken));
  FAILS(PRECAST_CODE_BAD_ARGUMENT, "/nowhere/file", precast_session_load(one, "/nowhere/file"));
  FAILS(PRECAST_CODE_BAD_ARGUMENT, "/nowhere/file", precast_session_save(one, "/nowhere/file"));
  FAILS(PRECAST_CODE_BAD_ARGUMENT, "`file` is NULL", precast_session_load(one, NULL));
  FAILS(PRECAST_CODE_BAD_ARGUMENT, "`file` is NULL", precast_session_save(one, NULL));
  total(one, 4, 8);
  int stream;
  FAILS(PRECAST_CODE_BAD_ARGUMENT, "`stream` is not NULL", precast_session_set_stream(one, &stream));
  OK(precast_session_set_stream(one, NULL));
  total(one, 5, 10);
  precast_session_free(one);
  CHECK(remove(file) == 0 && remove(broken) == 0);
}

void sessions(const char *store) {
  precast_options options = {.size = sizeof options, .sessions = 2, .wait_ms = 1};
  precast_runtime *runtime;
  precast_model *model;
  OK(precast_runtime_open(store, &options, &runtime));
  OK(precast_model_load(runtime, "chat", &model));
  precast_runtime_free(runtime);
  files(model);

  precast_session *one, *two, *none = GARBAGE;
  OK(precast_session_open(model, &one));
  OK(precast_session_open(model, &two));
  FAILS(PRECAST_CODE_BUSY, "sessions are in use", precast_session_open(model, &none));
  CHECK(none == NULL);
  precast_session_free(two);
  precast_model_free(model); /* The session keeps it. */

  total(one, 2, 4);
  total(one, 3, 6);
  OK(precast_session_fork(one, &two));
  total(one, 4, 8);
  total(two, 4, 8);
  OK(precast_session_reset(one));
  total(one, 2, 4);

  /* ids + positions + extra. */
  int64_t extra_data[] = {100}, extra_shape[] = {1};
  DLTensor extra = tensor(extra_data, 1, extra_shape, kDLInt, 64);
  const DLTensor *more[] = {&extra};
  precast_outputs *outputs = GARBAGE;
  int64_t prompt[] = {10, 20, 30, 40, 50, 60, 70};
  OK(precast_session_prefill(one, prompt, 6, more, 1, &outputs));
  numbers(outputs, 2, (int64_t[]){50 + 4 + 100, 60 + 5 + 100});
  CHECK(precast_session_position(one) == 6);
  OK(precast_session_prefill(one, prompt + 6, 1, more, 1, &outputs));
  numbers(outputs, 1, (int64_t[]){70 + 6 + 100});
  OK(precast_session_decode(one, 80, more, 1, &outputs));
  numbers(outputs, 1, (int64_t[]){80 + 7 + 100});
  CHECK(precast_session_position(one) == 8);

  precast_session_free(two);
  OK(precast_session_fork(one, &two));
  CHECK(precast_session_position(two) == 8);
  OK(precast_session_seek(two, 3));
  FAILS(PRECAST_CODE_BAD_ARGUMENT, "beyond 3", precast_session_seek(two, 4));
  OK(precast_session_decode(two, 1, more, 1, &outputs));
  numbers(outputs, 1, (int64_t[]){1 + 3 + 100});
  CHECK(precast_session_position(one) == 8);

  outputs = GARBAGE;
  FAILS(PRECAST_CODE_BAD_INPUT, "takes 3 inputs", precast_session_decode(two, 1, NULL, 0, &outputs));
  CHECK(outputs == NULL && precast_session_position(two) == 4);
  FAILS(PRECAST_CODE_BAD_ARGUMENT, "`tokens` is NULL", precast_session_prefill(two, NULL, 2, more, 1, &outputs));

  OK(precast_session_decode(two, 9, more, 1, &outputs));
  precast_session_free(one);
  precast_session_free(two);
  numbers(outputs, 1, (int64_t[]){9 + 4 + 100}); /* The outputs are the caller's. */
}

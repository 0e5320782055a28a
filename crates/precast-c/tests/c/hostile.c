/* Mistakes of a caller: each is an error, and the library answers the next call. */
#include "check.h"

#include <pthread.h>

enum { THREADS = 8, CALLS = 50 };

static precast_runtime *runtime;
static precast_model *model, *chat;
static precast_session *shared;

static float data[16 * 8];
static int64_t shape[2] = {5, 8};

static DLTensor good(void) {
  DLTensor x = {
      .data = data,
      .device = {kDLCPU, 0},
      .ndim = 2,
      .dtype = {kDLFloat, 32, 1},
      .shape = shape,
  };
  return x;
}

/* Runs `forward` on one tensor, which must be refused. */
static void refused(precast_code code, const char *text, const DLTensor *x) {
  const DLTensor *inputs[] = {x};
  precast_outputs *outputs = GARBAGE;
  FAILS(code, text, precast_model_run(model, "forward", inputs, NULL, 1, &outputs));
  CHECK(outputs == NULL);
}

/* Runs `forward` and checks its answer. */
static void answered(void) {
  DLTensor x = good();
  const DLTensor *inputs[] = {&x};
  float got[40];
  precast_outputs *outputs;
  OK(precast_model_run(model, "forward", inputs, NULL, 1, &outputs));
  OK(precast_outputs_check(outputs));
  OK(precast_outputs_copy(outputs, 0, got, sizeof got));
  for (int i = 0; i < 40; i++) CHECK(got[i] == 2 * data[i]);
  precast_outputs_free(outputs);
}

static void nulls(void) {
  DLTensor x = good();
  const DLTensor *inputs[] = {&x}, *empty[] = {NULL};
  const char *unnamed[] = {NULL};
  precast_outputs *outputs = GARBAGE;
  precast_session *session = GARBAGE;
  DLManagedTensorVersioned *exported = GARBAGE;
  char *text = GARBAGE;
  const precast_code bad = PRECAST_CODE_BAD_ARGUMENT;

  precast_error_free(NULL);
  precast_runtime_free(NULL);
  precast_model_free(NULL);
  precast_session_free(NULL);
  precast_outputs_free(NULL);
  precast_tensor_free(NULL);
  precast_string_free(NULL);

  FAILS(bad, "`store` is NULL", precast_runtime_open(NULL, NULL, &(precast_runtime *){NULL}));
  FAILS(bad, "`out` is NULL", precast_runtime_open("x", NULL, NULL));
  FAILS(bad, "`runtime` is NULL", precast_model_load(NULL, "double", &(precast_model *){NULL}));
  FAILS(bad, "`name` is NULL", precast_model_load(runtime, NULL, &(precast_model *){NULL}));
  FAILS(bad, "`out` is NULL", precast_model_load(runtime, "double", NULL));
  FAILS(bad, "`model` is NULL", precast_model_warm_up(NULL));
  FAILS(bad, "`model` is NULL", precast_model_check(NULL));
  FAILS(bad, "`model` is NULL", precast_model_stats(NULL, &text));
  CHECK(text == NULL);
  FAILS(bad, "`out` is NULL", precast_model_stats(model, NULL));
  CHECK(precast_model_module(NULL, 0) == NULL);

  FAILS(bad, "`model` is NULL", precast_model_run(NULL, "forward", inputs, NULL, 1, &outputs));
  CHECK(outputs == NULL);
  FAILS(bad, "`module` is NULL", precast_model_run(model, NULL, inputs, NULL, 1, &outputs));
  FAILS(bad, "`inputs` is NULL", precast_model_run(model, "forward", NULL, NULL, 1, &outputs));
  FAILS(bad, "no tensor as input 0", precast_model_run(model, "forward", empty, NULL, 1, &outputs));
  FAILS(bad, "`names` is NULL", precast_model_run(model, "forward", inputs, unnamed, 1, &outputs));
  FAILS(bad, "`out` is NULL", precast_model_run(model, "forward", inputs, NULL, 1, NULL));

  FAILS(bad, "`outputs` is NULL", precast_outputs_check(NULL));
  FAILS(bad, "`outputs` is NULL", precast_outputs_copy(NULL, 0, data, 4));
  FAILS(bad, "`outputs` is NULL", precast_outputs_export(NULL, 0, &exported));
  CHECK(exported == NULL);
  CHECK(precast_outputs_tensor(NULL, 0) == NULL && precast_outputs_name(NULL, 0) == NULL);

  FAILS(bad, "`model` is NULL", precast_session_open(NULL, &session));
  CHECK(session == NULL);
  FAILS(bad, "`session` is NULL", precast_session_run(NULL, "total", inputs, NULL, 1, &outputs));
  FAILS(bad, "`session` is NULL", precast_session_prefill(NULL, NULL, 0, NULL, 0, &outputs));
  FAILS(bad, "`session` is NULL", precast_session_decode(NULL, 0, NULL, 0, &outputs));
  FAILS(bad, "`session` is NULL", precast_session_seek(NULL, 0));
  FAILS(bad, "`session` is NULL", precast_session_reset(NULL));
  FAILS(bad, "`session` is NULL", precast_session_fork(NULL, &session));
  FAILS(bad, "`session` is NULL", precast_session_save(NULL, "file"));
  FAILS(bad, "`session` is NULL", precast_session_load(NULL, "file"));
  FAILS(bad, "`session` is NULL", precast_session_set_stream(NULL, NULL));
  FAILS(bad, "`model` is NULL", precast_model_swap(NULL, runtime, "double"));
  FAILS(bad, "`runtime` is NULL", precast_model_swap(model, NULL, "double"));
  FAILS(bad, "`release` is NULL", precast_model_swap(model, runtime, NULL));
  FAILS(bad, "`model` is NULL", precast_model_run_on(NULL, "forward", inputs, NULL, 1, NULL, &outputs));
  CHECK(precast_session_position(NULL) == 0);
}

static void tensors(void) {
  DLTensor x = good();
  x.data = NULL;
  refused(PRECAST_CODE_BAD_INPUT, "`data` is null", &x);
  x = good();
  x.shape = NULL;
  refused(PRECAST_CODE_BAD_INPUT, "`shape` is null", &x);
  x = good();
  x.ndim = -1;
  refused(PRECAST_CODE_BAD_INPUT, "`ndim` is -1", &x);
  x.ndim = INT32_MAX;
  refused(PRECAST_CODE_BAD_INPUT, "`ndim` is 2147483647", &x);
  x.ndim = 1;
  refused(PRECAST_CODE_BAD_INPUT, "expected 2 dimensions, got 1", &x);
  x = good();
  x.dtype.bits = 64;
  refused(PRECAST_CODE_BAD_INPUT, "float64", &x);
  x.dtype.code = kDLComplex;
  refused(PRECAST_CODE_BAD_INPUT, "`complex64`", &x);
  x.dtype.code = 255;
  refused(PRECAST_CODE_BAD_INPUT, "no module takes", &x);
  x = good();
  x.dtype.lanes = 4;
  refused(PRECAST_CODE_BAD_INPUT, "x4", &x);
  x = good();
  x.device.device_type = kDLCUDAHost;
  x.device.device_id = -7; /* Memory of the host. */
  const DLTensor *inputs[] = {&x};
  precast_outputs *outputs;
  OK(precast_model_run(model, "forward", inputs, NULL, 1, &outputs));
  precast_outputs_free(outputs);
  x = good();
  x.byte_offset = UINT64_MAX;
  refused(PRECAST_CODE_BAD_INPUT, "in no memory", &x);
  x.byte_offset = 2;
  refused(PRECAST_CODE_BAD_INPUT, "not aligned", &x);

  int64_t strange[][2] = {{-1, 8}, {17, 8}, {0, 8}, {5, 9}, {INT64_MAX, 8}, {INT64_MAX, INT64_MAX}, {INT64_MIN, 1}};
  for (size_t i = 0; i < sizeof strange / sizeof *strange; i++) {
    x = good();
    x.shape = strange[i];
    const DLTensor *one[] = {&x};
    outputs = GARBAGE;
    precast_error *error = precast_model_run(model, "forward", one, NULL, 1, &outputs);
    CHECK(error != NULL && outputs == NULL);
    CHECK(error->code == PRECAST_CODE_BAD_INPUT || error->code == PRECAST_CODE_NO_FIT);
    precast_error_free(error);
  }
  int64_t strides[] = {1, 5};
  x = good();
  x.strides = strides; /* Another order of the same memory. */
  refused(PRECAST_CODE_BAD_INPUT, "stride", &x);
}

static void names(void) {
  DLTensor x = good();
  const DLTensor *inputs[] = {&x, &x};
  precast_outputs *outputs = GARBAGE;
  precast_model *none = GARBAGE;
  const char *unknown[] = {"nothing"}, *no_utf8[] = {"\xff\xfe"};

  FAILS(PRECAST_CODE_NOT_FOUND, "no model `nothing`", precast_model_load(runtime, "nothing", &none));
  CHECK(none == NULL);
  FAILS(PRECAST_CODE_NOT_FOUND, "double@9", precast_model_load(runtime, "double@9", &none));
  FAILS(PRECAST_CODE_BAD_ARGUMENT, "can't name a model", precast_model_load(runtime, "", &none));
  FAILS(PRECAST_CODE_BAD_ARGUMENT, "not UTF-8", precast_model_load(runtime, "\xc3\x28", &none));
  FAILS(PRECAST_CODE_NOT_FOUND, "no module `nothing`", precast_model_run(model, "nothing", inputs, NULL, 1, &outputs));
  FAILS(PRECAST_CODE_BAD_ARGUMENT, "not UTF-8", precast_model_run(model, "\xff", inputs, NULL, 1, &outputs));
  FAILS(PRECAST_CODE_BAD_INPUT, "`nothing`", precast_model_run(model, "forward", inputs, unknown, 1, &outputs));
  FAILS(PRECAST_CODE_BAD_ARGUMENT, "not UTF-8", precast_model_run(model, "forward", inputs, no_utf8, 1, &outputs));
  FAILS(PRECAST_CODE_BAD_INPUT, "takes 1 inputs", precast_model_run(model, "forward", inputs, NULL, 2, &outputs));
  FAILS(PRECAST_CODE_BAD_INPUT, "takes 1 inputs", precast_model_run(model, "forward", NULL, NULL, 0, &outputs));
  FAILS(PRECAST_CODE_BAD_ARGUMENT, "longer than any memory",
        precast_model_run(model, "forward", inputs, NULL, SIZE_MAX / 2, &outputs));
  const DLTensor *const *odd = (const DLTensor *const *)((const char *)inputs + 1);
  FAILS(PRECAST_CODE_BAD_ARGUMENT, "not aligned", precast_model_run(model, "forward", odd, NULL, 1, &outputs));
  CHECK(outputs == NULL);
  FAILS(PRECAST_CODE_BAD_ARGUMENT, "without a session", precast_model_run(chat, "total", inputs, NULL, 1, &outputs));
  FAILS(PRECAST_CODE_NOT_FOUND, "not a store", precast_runtime_open("/\xff\xfe", NULL, &(precast_runtime *){NULL}));
  FAILS(PRECAST_CODE_LOAD_FAILED, "only one", precast_libtorch("/nowhere", 0));
  FAILS(PRECAST_CODE_BAD_ARGUMENT, "`untried` is 7", precast_libtorch(NULL, 7));

  CHECK(precast_model_module(model, 1) == NULL && precast_model_module(model, SIZE_MAX) == NULL);
}

/* Opens a runtime with options that must be refused. */
static void option(const char *store, const char *text, const void *options) {
  precast_runtime *none = GARBAGE;
  FAILS(PRECAST_CODE_BAD_ARGUMENT, text, precast_runtime_open(store, options, &none));
  CHECK(none == NULL);
}

static void options(const char *store) {
  const DLDevice devices[] = {{kDLCPU, 0}, {kDLCUDAHost, 0}, {kDLCUDA, -1}};
  precast_options zero = {0}, size = {.size = 3}, loading = {.size = sizeof zero, .loading = 3},
                  graphs = {.size = sizeof zero, .graphs = -1}, copy = {.size = sizeof zero, .copy_inputs = 2},
                  eager = {.size = sizeof zero, .no_eager = -1},
                  missing = {.size = sizeof zero, .device_count = 1},
                  pinned = {.size = sizeof zero, .devices = devices, .device_count = 2},
                  ordinal = {.size = sizeof zero, .devices = devices + 2, .device_count = 1};
  option(store, "`size`", &zero);
  option(store, "`size`", &size);
  option(store, "loading` is 3", &loading);
  option(store, "graphs` is -1", &graphs);
  option(store, "copy_inputs` is 2", &copy);
  option(store, "no_eager` is -1", &eager);
  option(store, "devices` is NULL", &missing);
  option(store, "neither kDLCPU nor kDLCUDA", &pinned);
  option(store, "neither kDLCPU nor kDLCUDA", &ordinal);

  /* A program with a later header, and one with an earlier header. */
  struct {
    precast_options known;
    uint64_t later;
  } later = {.known = {.size = sizeof later}, .later = 0};
  precast_runtime *opened;
  OK(precast_runtime_open(store, &later.known, &opened));
  precast_runtime_free(opened);
  later.later = 1;
  option(store, "does not know", &later);
  struct {
    size_t size;
    const DLDevice *devices;
    size_t device_count;
  } earlier = {.size = sizeof earlier, .devices = devices, .device_count = 1};
  OK(precast_runtime_open(store, (const precast_options *)(const void *)&earlier, &opened));
  precast_runtime_free(opened);

  precast_options all = {
      .size = sizeof all,
      .devices = (const DLDevice[]){{kDLCPU, 0}, {kDLCPU, 0}},
      .device_count = 2,
      .instances = 1,
      .sessions = 1,
      .session_limit = 1,
      .wait_ms = 1000,
      .loading = PRECAST_LOADING_ON_DEMAND,
      .graphs = PRECAST_GRAPHS_NEVER,
      .copy_inputs = 1,
      .no_eager = 1,
      .upload_limit = 1,
  };
  OK(precast_runtime_open(store, &all, &opened));
  precast_model *copies;
  precast_model *none;
  OK(precast_model_load(opened, "double@1", &copies));
  OK(precast_model_warm_up(copies));
  OK(precast_model_check(copies));
  DLTensor x = good();
  int64_t strides[] = {1, 5};
  x.strides = strides;
  const DLTensor *inputs[] = {&x};
  precast_outputs *outputs;
  OK(precast_model_run(copies, "forward", inputs, NULL, 1, &outputs));
  FAILS(PRECAST_CODE_LOAD_FAILED, "all sessions may take 1", precast_model_load(opened, "chat", &none));
  precast_runtime_free(opened);
  precast_model_free(copies);
  float got[40];
  OK(precast_outputs_copy(outputs, 0, got, sizeof got));
  for (int i = 0; i < 40; i++) CHECK(got[i] == 2 * data[i / 8 + i % 8 * 5]);
  precast_outputs_free(outputs);
}

static void outputs_of_a_call(void) {
  DLTensor x = good();
  const DLTensor *inputs[] = {&x};
  float got[40];
  precast_outputs *outputs;
  OK(precast_model_run(model, "forward", inputs, NULL, 1, &outputs));
  FAILS(PRECAST_CODE_NOT_FOUND, "no output 2", precast_outputs_copy(outputs, 2, got, sizeof got));
  FAILS(PRECAST_CODE_BAD_ARGUMENT, "is 159", precast_outputs_copy(outputs, 0, got, sizeof got - 1));
  FAILS(PRECAST_CODE_BAD_ARGUMENT, "is 161", precast_outputs_copy(outputs, 0, got, sizeof got + 1));
  FAILS(PRECAST_CODE_BAD_ARGUMENT, "`data` is NULL", precast_outputs_copy(outputs, 0, NULL, sizeof got));
  FAILS(PRECAST_CODE_BAD_ARGUMENT, "`out` is NULL", precast_outputs_export(outputs, 0, NULL));
  CHECK(precast_outputs_tensor(outputs, 2) == NULL && precast_outputs_name(outputs, SIZE_MAX) == NULL);

  DLManagedTensorVersioned *y = GARBAGE, *sums;
  FAILS(PRECAST_CODE_NOT_FOUND, "no output 2", precast_outputs_export(outputs, 2, &y));
  CHECK(y == NULL);
  OK(precast_outputs_export(outputs, 0, &y));
  OK(precast_outputs_export(outputs, 1, &sums));
  CHECK(y->version.major == 1 && y->deleter != NULL && (y->flags & DLPACK_FLAG_BITMASK_READ_ONLY) == 0);
  CHECK(y->dl_tensor.data == precast_outputs_tensor(outputs, 0)->data);
  precast_outputs_free(outputs);

  /* It outlives the outputs, and is an input of another call. */
  inputs[0] = &y->dl_tensor;
  CHECK(y->dl_tensor.shape[0] == 5 && y->dl_tensor.shape[1] == 8);
  OK(precast_model_run(model, "forward", inputs, NULL, 1, &outputs));
  OK(precast_outputs_copy(outputs, 0, got, sizeof got));
  for (int i = 0; i < 40; i++) CHECK(got[i] == 4 * data[i]);
  precast_outputs_free(outputs);
  y->deleter(y);
  precast_tensor_free(sums);

  /* A tensor of another library, without a deleter. */
  DLManagedTensorVersioned foreign = {.version = {1, 0}, .deleter = NULL, .dl_tensor = good()};
  precast_tensor_free(&foreign);
}

/* An output that is an input does not share the memory of the caller. */
static void aliases(void) {
  int64_t *ids = malloc(3 * sizeof *ids), at[] = {0, 1, 2}, extra[] = {0}, sizes[] = {1, 3}, got[3];
  for (int i = 0; i < 3; i++) ids[i] = 7 + i;
  DLTensor tensors[3];
  const DLTensor *inputs[3];
  for (int i = 0; i < 3; i++) {
    tensors[i] = good();
    tensors[i].dtype.code = kDLInt;
    tensors[i].dtype.bits = 64;
    tensors[i].ndim = i == 0 ? 2 : 1;
    tensors[i].shape = i == 0 ? sizes : i == 1 ? sizes + 1 : sizes;
    inputs[i] = &tensors[i];
  }
  tensors[0].data = ids;
  tensors[1].data = at;
  tensors[2].data = extra;
  precast_outputs *outputs;
  OK(precast_model_run(chat, "same", inputs, NULL, 3, &outputs));
  CHECK(precast_outputs_tensor(outputs, 0)->data != ids);
  memset(ids, 0, 3 * sizeof *ids);
  free(ids);
  OK(precast_outputs_copy(outputs, 0, got, sizeof got));
  CHECK(got[0] == 7 && got[1] == 8 && got[2] == 9);
  precast_outputs_free(outputs);
}

/* A call that fails while it runs: the model answers others, and the session answers after a reset. */
static void failures(void) {
  float below[] = {-1, 2}, above[] = {1, 2};
  int64_t sizes[] = {1, 2};
  DLTensor x = good();
  x.shape = sizes;
  x.data = below;
  const DLTensor *inputs[] = {&x};
  precast_outputs *outputs = GARBAGE;
  FAILS(PRECAST_CODE_CALL_FAILED, "negative", precast_model_run(chat, "fails", inputs, NULL, 1, &outputs));
  CHECK(outputs == NULL);
  x.data = above;
  OK(precast_model_run(chat, "fails", inputs, NULL, 1, &outputs));
  precast_outputs_free(outputs);

  char *stats;
  OK(precast_model_stats(chat, &stats));
  CHECK(strstr(stats, "\"failed\":1") != NULL && strstr(stats, "\"quarantined\":[]") != NULL);
  precast_string_free(stats);
}

/* A device without streams, and weights that do not fit: the model answers as before. */
static void streams_and_weights(void) {
  DLTensor x = good();
  const DLTensor *inputs[] = {&x};
  precast_outputs *outputs = GARBAGE;
  int stream;
  FAILS(PRECAST_CODE_BAD_ARGUMENT, "`stream` is not NULL",
        precast_model_run_on(model, "forward", inputs, NULL, 1, &stream, &outputs));
  CHECK(outputs == NULL);
  x.device.device_type = kDLCUDA;
  precast_error *error = precast_model_run_on(model, "forward", inputs, NULL, 1, &stream, &outputs);
  CHECK(error != NULL && outputs == NULL);
  precast_error_free(error);

  FAILS(PRECAST_CODE_NOT_FOUND, "no model `nothing`", precast_model_swap(model, runtime, "nothing"));
  FAILS(PRECAST_CODE_NOT_FOUND, "triple@9", precast_model_swap(model, runtime, "triple@9"));
  FAILS(PRECAST_CODE_BAD_ARGUMENT, "not UTF-8", precast_model_swap(model, runtime, "\xc3\x28"));
  FAILS(PRECAST_CODE_LOAD_FAILED, "`scale`", precast_model_swap(model, runtime, "other"));
  answered();
  OK(precast_model_swap(model, runtime, "triple"));
  x = good();
  float got[40];
  OK(precast_model_run_on(model, "forward", inputs, NULL, 1, NULL, &outputs));
  OK(precast_outputs_copy(outputs, 0, got, sizeof got));
  for (int i = 0; i < 40; i++) CHECK(got[i] == 3 * data[i]);
  precast_outputs_free(outputs);
  OK(precast_model_swap(model, runtime, "double@1"));
  answered();
}

static void *caller(void *number) {
  float pair[] = {1, 2};
  int64_t sizes[] = {1, 2};
  DLTensor x = good();
  x.shape = sizes;
  x.data = pair;
  const DLTensor *inputs[] = {&x};
  for (int i = 0; i < CALLS; i++) {
    answered();
    nulls();
    /* All threads have one session. */
    precast_outputs *outputs;
    OK(precast_session_run(shared, "total", inputs, NULL, 1, &outputs));
    precast_outputs_free(outputs);
    if (*(int *)number == 0 && i % 10 == 0) {
      precast_session *fork;
      OK(precast_session_fork(shared, &fork));
      precast_session_free(fork);
    }
  }
  return NULL;
}

static void threads(void) {
  pthread_t running[THREADS];
  int numbers[THREADS];
  OK(precast_session_open(chat, &shared));
  for (int i = 0; i < THREADS; i++) {
    numbers[i] = i;
    CHECK(pthread_create(&running[i], NULL, caller, &numbers[i]) == 0);
  }
  for (int i = 0; i < THREADS; i++) CHECK(pthread_join(running[i], NULL) == 0);

  /* x and the sum of all x: no call of the others is lost. */
  float pair[] = {0, 0}, got[2];
  int64_t sizes[] = {1, 2};
  DLTensor x = good();
  x.shape = sizes;
  x.data = pair;
  const DLTensor *inputs[] = {&x};
  precast_outputs *outputs;
  OK(precast_session_run(shared, "total", inputs, NULL, 1, &outputs));
  OK(precast_outputs_copy(outputs, 0, got, sizeof got));
  CHECK(got[0] == THREADS * CALLS && got[1] == 2 * THREADS * CALLS);
  precast_outputs_free(outputs);
  precast_session_free(shared);
}

void mistakes(const char *store) {
  for (int i = 0; i < 16 * 8; i++) data[i] = (float)i;
  OK(precast_runtime_open(store, NULL, &runtime));
  OK(precast_model_load(runtime, "double", &model));
  OK(precast_model_load(runtime, "chat", &chat));

  answered();
  nulls();
  tensors();
  names();
  options(store);
  outputs_of_a_call();
  aliases();
  failures();
  streams_and_weights();
  threads();
  answered();

  precast_model_free(chat);
  precast_model_free(model);
  CHECK(precast_shut_down() == 1);
  FAILS(PRECAST_CODE_UNREADY, "ending", precast_model_load(runtime, "double", &model));
  precast_runtime_free(runtime);
}

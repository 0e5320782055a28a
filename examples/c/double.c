/*
 * Loads the model of examples/double and runs it.
 *
 *     make lib
 *     cc -std=c99 examples/c/double.c $(pkg-config --cflags --libs target/c/lib/pkgconfig/precast.pc) -o double
 *     LD_LIBRARY_PATH=target/c/lib ./double .venv/libtorch artifacts
 */
#include <precast.h>

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

/* Ends the program if a function failed. */
static void check(precast_error *error) {
  if (error == NULL) return;
  fprintf(stderr, "error: %s\nhint: %s\n", error->message, error->hint);
  precast_error_free(error);
  exit(1);
}

static void print_tensor(const precast_tensor_info *tensor) {
  printf(" %s [", tensor->name);
  for (int32_t axis = 0; axis < tensor->ndim; axis++) {
    if (axis > 0) printf(", ");
    if (tensor->dims[axis] != NULL) {
      printf("%s", tensor->dims[axis]);
    } else {
      printf("%" PRId64, tensor->shape[axis]);
    }
  }
  printf("]");
}

static void print_module(const precast_module *module) {
  printf("%s:", module->name);
  for (size_t i = 0; i < module->input_count; i++) print_tensor(module->inputs[i]);
  printf(" ->");
  for (size_t i = 0; i < module->output_count; i++) print_tensor(module->outputs[i]);
  printf("\n");
  for (size_t i = 0; i < module->bucket_count; i++) {
    printf("  bucket:");
    for (size_t dim = 0; dim < module->dim_count; dim++) {
      const precast_bucket *bucket = module->buckets[i];
      printf(" %s from %" PRId64, module->dims[dim], bucket->min[dim]);
      if (bucket->max[dim] != INT64_MAX) printf(" to %" PRId64, bucket->max[dim]);
    }
    printf("\n");
  }
}

int main(int argc, char **argv) {
  if (argc != 3) {
    fprintf(stderr, "usage: %s LIBTORCH STORE\n", argv[0]);
    return 2;
  }
  check(precast_libtorch(argv[1], 0));

  precast_options options = {.size = sizeof options, .instances = 2};
  precast_runtime *runtime;
  check(precast_runtime_open(argv[2], &options, &runtime));
  precast_model *model;
  check(precast_model_load(runtime, "double", &model));

  const precast_module *module;
  for (size_t i = 0; (module = precast_model_module(model, i)) != NULL; i++) print_module(module);

  /* An input is memory of the program. */
  float data[5][8];
  for (int i = 0; i < 40; i++) data[i / 8][i % 8] = (float)i / 40;
  int64_t shape[] = {5, 8};
  DLTensor x = {
      .data = data,
      .device = {kDLCPU, 0},
      .ndim = 2,
      .dtype = {kDLFloat, 32, 1},
      .shape = shape,
  };
  const DLTensor *inputs[] = {&x};
  precast_outputs *outputs;
  check(precast_model_run(model, "forward", inputs, NULL, 1, &outputs));

  const DLTensor *y = precast_outputs_tensor(outputs, 0);
  float values[40];
  check(precast_outputs_copy(outputs, 0, values, sizeof values));
  printf("%s: [%" PRId64 ", %" PRId64 "]", precast_outputs_name(outputs, 0), y->shape[0], y->shape[1]);
  for (int i = 0; i < 4; i++) printf(" %.4f", values[i]);
  printf("\n");

  /* The same by name. A tensor of three axes is refused. */
  const char *names[] = {"x"};
  int64_t wrong[] = {5, 4, 2};
  x.ndim = 3;
  x.shape = wrong;
  precast_outputs *none;
  precast_error *error = precast_model_run(model, "forward", inputs, names, 1, &none);
  if (error == NULL) return 1;
  printf("refused: %s\n", error->message);
  precast_error_free(error);

  char *stats;
  check(precast_model_stats(model, &stats));
  printf("%s\n", stats);
  precast_string_free(stats);

  precast_outputs_free(outputs);
  precast_model_free(model);
  precast_runtime_free(runtime);
  return 0;
}

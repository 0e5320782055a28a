// A fake artifact: the C ABI of an AOTInductor shared object around one line of arithmetic, so that tests get one in
// the time a C compiler takes. Every element of the output is
//
//     SCALE * (input 0 + input 1 + …) + OFFSET
//
// where SCALE is the artifact's only constant (`c0`, float32 [1]) and OFFSET is compiled in. All inputs have the
// output's shape, which is float32 and contiguous.
//
// The including file defines:
//   NUM_INPUTS, INPUT_DTYPES   how many, and their scalar types as torch numbers them (0 uint8 … 4 int64, 6 float, 11 bool)
//   DIMS, SIZES                rank and sizes of the output
//   OFFSET                     a double
//   RUN_FAILS                  1: every run reports an error
//   ANSWERS_NAN                1: the first element is NaN
//   LEAKS                      1: a zero at the very end, as padding has, changes the first element
//   VARIES                     1: every other run differs in the last bits
//   SLEEP_US                   how long every run takes, at least
//   WARNS                      1: every run makes libtorch print a warning
//   CRASHES                    1: every run ends the process

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define EXPORT __attribute__((visibility("default")))
#define CONTAINER(name) EXPORT int32_t AOTInductorModelContainer##name

typedef void *Tensor;
typedef struct { const char *name; Tensor handle; } Entry;
typedef struct { Tensor scale; } Container;

// From libtorch_cpu.so.
int32_t aoti_torch_get_data_ptr(Tensor, void **);
int32_t aoti_torch_delete_tensor_object(Tensor);
void aoti_torch_warn(const char *, const char *, uint32_t, const char *);
int32_t aoti_torch_empty_strided(int64_t, const int64_t *, const int64_t *, int32_t, int32_t, int32_t, Tensor *);

enum { FLOAT32 = 6 };
static const int dtypes[] = INPUT_DTYPES;
static const int64_t sizes[] = SIZES;

static double element(const void *data, int dtype, int64_t i) {
    switch (dtype) {
    case 0: return ((const uint8_t *)data)[i];
    case 1: return ((const int8_t *)data)[i];
    case 2: return ((const int16_t *)data)[i];
    case 3: return ((const int32_t *)data)[i];
    case 4: return (double)((const int64_t *)data)[i];
    case 6: return ((const float *)data)[i];
    case 7: return ((const double *)data)[i];
    case 11: return ((const uint8_t *)data)[i] != 0;
    default: return NAN;
    }
}

static int32_t run(Container *self, Tensor *inputs, Tensor *outputs) {
    if (RUN_FAILS) {
        fprintf(stderr, "Error: fake artifact fails\n");
        return 1;
    }
    if (CRASHES) abort();
    if (WARNS) aoti_torch_warn(__func__, __FILE__, __LINE__, "the fake artifact warns");
    nanosleep(&(struct timespec){ .tv_nsec = SLEEP_US * 1000L }, NULL);
    int64_t strides[DIMS + 1], count = 1;
    for (int d = DIMS - 1; d >= 0; d--) {
        strides[d] = count;
        count *= sizes[d];
    }
    void *scale, *out, *data[NUM_INPUTS];
    if (!self->scale || aoti_torch_get_data_ptr(self->scale, &scale)) return 1;
    for (int k = 0; k < NUM_INPUTS; k++)
        if (aoti_torch_get_data_ptr(inputs[k], &data[k])) return 1;
    if (aoti_torch_empty_strided(DIMS, sizes, strides, FLOAT32, 0, 0, &outputs[0])) return 1;
    if (aoti_torch_get_data_ptr(outputs[0], &out)) return 1;
    for (int64_t i = 0; i < count; i++) {
        double sum = 0;
        for (int k = 0; k < NUM_INPUTS; k++) sum += element(data[k], dtypes[k], i);
        ((float *)out)[i] = (float)(*(float *)scale * sum + OFFSET);
    }
    static int runs;
    if (VARIES && count) ((float *)out)[0] += 1e-6f * (runs++ % 2);
    if (LEAKS && count && element(data[0], dtypes[0], count - 1) == 0) ((float *)out)[0] += 1;
    if (ANSWERS_NAN && count) ((float *)out)[0] = NAN;
    // Input handles are stolen.
    for (int k = 0; k < NUM_INPUTS; k++) {
        aoti_torch_delete_tensor_object(inputs[k]);
        inputs[k] = NULL;
    }
    return 0;
}

CONTAINER(CreateWithDevice)(Container **out, size_t models, const char *device, const char *cubins) {
    (void)models, (void)device, (void)cubins;
    *out = calloc(1, sizeof(Container));
    return *out == NULL;
}
CONTAINER(Delete)(Container *self) {
    free(self);
    return 0;
}
CONTAINER(GetNumInputs)(Container *self, size_t *n) {
    (void)self;
    *n = NUM_INPUTS;
    return 0;
}
CONTAINER(GetNumOutputs)(Container *self, size_t *n) {
    (void)self;
    *n = 1;
    return 0;
}
CONTAINER(GetInputName)(Container *self, size_t i, const char **name) {
    static char names[NUM_INPUTS][8];
    (void)self;
    snprintf(names[i], sizeof names[i], "in%zu", i);
    *name = names[i];
    return 0;
}
CONTAINER(GetOutputName)(Container *self, size_t i, const char **name) {
    (void)self, (void)i;
    *name = "out0";
    return 0;
}
CONTAINER(GetNumConstants)(Container *self, size_t *n) {
    (void)self;
    *n = 1;
    return 0;
}
CONTAINER(GetConstantName)(Container *self, size_t i, const char **name) {
    (void)self, (void)i;
    *name = "L_c0";
    return 0;
}
CONTAINER(GetConstantOriginalFQN)(Container *self, size_t i, const char **name) {
    (void)self, (void)i;
    *name = "c0";
    return 0;
}
CONTAINER(GetConstantFromFolded)(Container *self, size_t i, bool *folded) {
    (void)self, (void)i;
    *folded = false;
    return 0;
}
CONTAINER(GetConstantType)(Container *self, size_t i, int32_t *type) {
    (void)self, (void)i;
    *type = 1;  // a parameter
    return 0;
}
CONTAINER(GetConstantDtype)(Container *self, size_t i, int32_t *dtype) {
    (void)self, (void)i;
    *dtype = FLOAT32;
    return 0;
}
CONTAINER(GetConstantDataSize)(Container *self, size_t i, size_t *size) {
    (void)self, (void)i;
    *size = sizeof(float);
    return 0;
}
CONTAINER(UpdateUserManagedConstantBufferPairs)(Container *self, const Entry *pairs, size_t n, bool inactive, bool all) {
    (void)inactive;
    for (size_t k = 0; k < n; k++)
        if (!strcmp(pairs[k].name, "L_c0")) self->scale = pairs[k].handle;
    return all && !self->scale;
}
CONTAINER(Run)(Container *self, Tensor *in, size_t n, Tensor *out, size_t m, void *stream, void *proxy) {
    (void)stream, (void)proxy;
    return n == NUM_INPUTS && m == 1 ? run(self, in, out) : 1;
}
CONTAINER(RunSingleThreaded)(Container *self, Tensor *in, size_t n, Tensor *out, size_t m, void *stream, void *proxy) {
    (void)stream, (void)proxy;
    return n == NUM_INPUTS && m == 1 ? run(self, in, out) : 1;
}

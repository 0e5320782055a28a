// A fake artifact that can misbehave in every way a real one might: the C ABI of an AOTInductor shared object, for
// tests of the runtime that need no compiler but g++. (The fake worker's artifacts, which behave, are artifact.c.)
//
// It takes one float32 input [ROWS, COLS], INPUTS - 1 int64 inputs of the same shape, and the constants `scale`
// (float32 [ELEMENTS]) and `shift.0`, `shift.1`, … (the same), CONSTANTS of them in all. Its output is float32 [ROWS,
// COLS]:
//
//     out = x * scale + (shift.0 + …) + (the int64 inputs)
//
// with a state (STATE=1, the last input, float32 [ROWS, COLS]), which x is added to before anything else:
//
//     out = … + state
//
// and, with a second output (OUTPUTS=2), float32 [ROWS]: the sum of each row. Like a real artifact it checks nothing
// about its inputs, steals their handles, and prints the text of an exception on std::cerr.
//
// SALT makes otherwise equal objects differ, so that a test has one nobody else has loaded. Of the constants the first
// element is used. The compiler's command line defines all of these names, and BEHAVIOUR as one of those below.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <stdexcept>
#include <string>
#include <unistd.h>

// Behaviours.
#define OK 0
#define THROWS 1          // lets a C++ exception through extern "C"
#define FAILS 2           // returns an error code and prints why
#define FAILS_HALF 3      // the same, after it stole one input and wrote one output
#define BAD_SHAPE 4       // an output of another shape
#define BAD_DTYPE 5       // an output of another dtype
#define NO_OUTPUT 6       // success, and no output written
#define RETURNS_INPUT 7   // the output is the input's own memory
#define RETURNS_WEIGHT 8  // the output is `scale`'s own memory (ROWS = 1, COLS = 1)
#define LEAKS 9           // forgets one tensor a call
#define NO_CONTAINER 10   // can't be created
#define NO_SYMBOL 11      // lacks a function of the ABI
#define HANGS 12          // sleeps a second before it answers when x[0] is below 0
#define FAILS_BELOW 13    // fails when x[0] is below 0
#define DYNAMIC 14        // takes any rows and columns (INPUTS = 1)
#define CANARY 15         // as soon as it is loaded, makes the file that PRECAST_CANARY names
#define INIT_CRASHES 16   // as soon as it is loaded, crashes
#define INIT_HANGS 17     // as soon as it is loaded, sleeps for ten minutes
#define INIT_EXITS 18     // as soon as it is loaded, says as well as it can that all went well, and ends its process
#define NEEDS_NEWER 19    // calls a function that no libtorch has

extern "C" {
// libtorch's stable C ABI, as artifacts use it.
int32_t aoti_torch_get_data_ptr(void* tensor, void** data);
int32_t aoti_torch_get_sizes(void* tensor, int64_t** sizes);
int32_t aoti_torch_delete_tensor_object(void* tensor);
int32_t aoti_torch_new_tensor_handle(void* tensor, void** made);
int32_t aoti_torch__reinterpret_tensor(
    void* tensor, int64_t rank, const int64_t* sizes, const int64_t* strides, int64_t offset, void** made);
int32_t aoti_torch_empty_strided(
    int64_t rank, const int64_t* sizes, const int64_t* strides, int32_t dtype, int32_t device, int32_t index, void** made);
int32_t aoti_torch_dtype_float32();
int32_t aoti_torch_dtype_int64();
int32_t aoti_torch_device_type_cpu();
}

#if BEHAVIOUR == NEEDS_NEWER
extern "C" int32_t aoti_torch_of_a_later_version();
#endif

namespace {

volatile int salt = SALT;

__attribute__((constructor)) void loaded() {
  if (BEHAVIOUR == INIT_CRASHES) std::abort();
  if (BEHAVIOUR == INIT_HANGS) sleep(600);
  if (BEHAVIOUR == INIT_EXITS) {
    // The request of a trial's helper has the word that the answer must repeat.
    char given[4096] = "";
    if (pread(0, given, sizeof given - 1, 0) < 0) given[0] = 0;
    const char* word = std::strstr(given, "\"word\":\"");
    dprintf(1, "\nloaded %.16s\nloaded\n", word ? word + 8 : "0000000000000000");
    _exit(77);
  }
  const char* path = BEHAVIOUR == CANARY ? std::getenv("PRECAST_CANARY") : nullptr;
  if (FILE* file = path ? std::fopen(path, "w") : nullptr) std::fclose(file);
}

struct Container {
  void* bound[CONSTANTS + 1] = {};
  // Counts callers, as a real container's state would be torn by two.
  int inside = 0;
};

struct Pair {
  const char* name;
  void* tensor;
};

std::string fqn(size_t i) { return i == 0 ? "scale" : "shift." + std::to_string(i - 1); }
// Names inside the container are not those a record uses.
std::string name(size_t i) { return "c" + std::to_string(i); }

const float* floats(void* tensor) {
  void* data = nullptr;
  aoti_torch_get_data_ptr(tensor, &data);
  return static_cast<const float*>(data);
}

void* make(int64_t rank, const int64_t* sizes, int32_t dtype) {
  int64_t strides[4] = {1, 1, 1, 1};
  for (int64_t i = rank - 1; i > 0; i--) strides[i - 1] = strides[i] * sizes[i];
  void* made = nullptr;
  if (aoti_torch_empty_strided(rank, sizes, strides, dtype, aoti_torch_device_type_cpu(), 0, &made) != 0)
    throw std::runtime_error("no memory for an output");
  return made;
}

void run(Container* c, void** in, void** out) {
  if (c->inside++ != 0) std::abort();
  struct Leave {
    Container* c;
    ~Leave() { c->inside--; }
  } leave{c};
  const float* x = floats(in[0]);
  float* state = STATE ? const_cast<float*>(floats(in[INPUTS])) : nullptr;
  for (int64_t i = 0; STATE && i < ROWS * COLS; i++) state[i] += x[i];
#if BEHAVIOUR == NEEDS_NEWER
  aoti_torch_of_a_later_version();
#endif
  if (BEHAVIOUR == THROWS) throw std::runtime_error("thrown through the C ABI");
  if (BEHAVIOUR == FAILS) throw std::runtime_error("refused by the fake");
  if (BEHAVIOUR == FAILS_BELOW && x[0] < 0) throw std::runtime_error("negative");
  if (BEHAVIOUR == HANGS && x[0] < 0) sleep(1);
  if (BEHAVIOUR == NO_OUTPUT) {
    for (int i = 0; i < INPUTS + STATE; i++) { aoti_torch_delete_tensor_object(in[i]); in[i] = nullptr; }
    return;
  }
  if (BEHAVIOUR == RETURNS_INPUT) {
    out[0] = in[0];
    in[0] = nullptr;
    return;
  }
  if (BEHAVIOUR == RETURNS_WEIGHT) {
    const int64_t ones[2] = {1, 1};
    aoti_torch__reinterpret_tensor(c->bound[0], 2, ones, ones, 0, &out[0]);
    aoti_torch_delete_tensor_object(in[0]);
    in[0] = nullptr;
    return;
  }
  int64_t sizes[2] = {ROWS, BEHAVIOUR == BAD_SHAPE ? COLS + 1 : COLS};
  int64_t rows_n = ROWS, cols_n = COLS;
  if (BEHAVIOUR == DYNAMIC) {
    int64_t* given = nullptr;
    aoti_torch_get_sizes(in[0], &given);
    sizes[0] = rows_n = given[0];
    sizes[1] = cols_n = given[1];
  }
  void* made = make(2, sizes, BEHAVIOUR == BAD_DTYPE ? aoti_torch_dtype_int64() : aoti_torch_dtype_float32());
  if (BEHAVIOUR == LEAKS) {
    void* lost = nullptr;
    aoti_torch_new_tensor_handle(made, &lost);
  }
  out[0] = made;
  if (BEHAVIOUR == FAILS_HALF) {
    aoti_torch_delete_tensor_object(in[0]);
    in[0] = nullptr;
    throw std::runtime_error("gave up half way");
  }
  float scale = CONSTANTS > 0 ? floats(c->bound[0])[0] : 1;
  float shift = 0;
  for (int i = 1; i < CONSTANTS; i++) shift += floats(c->bound[i])[0];
  float* y = const_cast<float*>(floats(made));
  for (int64_t i = 0; i < rows_n * cols_n; i++) {
    y[i] = x[i] * scale + shift + (STATE ? state[i] : 0);
    for (int k = 1; k < INPUTS; k++) y[i] += static_cast<float>(reinterpret_cast<const int64_t*>(floats(in[k]))[i]);
  }
  if (OUTPUTS > 1) {
    const int64_t rows[1] = {rows_n};
    out[1] = make(1, rows, aoti_torch_dtype_float32());
    float* sum = const_cast<float*>(floats(out[1]));
    for (int64_t r = 0; r < rows_n; r++) {
      sum[r] = 0;
      for (int64_t i = 0; i < cols_n; i++) sum[r] += y[r * cols_n + i];
    }
  }
  for (int i = 0; i < INPUTS + STATE; i++) {
    aoti_torch_delete_tensor_object(in[i]);
    in[i] = nullptr;
  }
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int32_t AOTInductorModelContainerCreateWithDevice(void** made, size_t, const char*, const char*) {
  if (BEHAVIOUR == NO_CONTAINER) {
    std::cerr << "Error: the fake has no container\n";
    return 1;
  }
  *made = new Container;
  return 0;
}
EXPORT int32_t AOTInductorModelContainerDelete(void* c) {
  delete static_cast<Container*>(c);
  return 0;
}
EXPORT int32_t AOTInductorModelContainerRunSingleThreaded(
    void* c, void** in, size_t n_in, void** out, size_t n_out, void*, void*) {
  // The real entry point checks the counts outside of its try block.
  if (n_in != INPUTS + STATE || n_out != OUTPUTS) throw std::runtime_error("expected another number of inputs or outputs");
  if (BEHAVIOUR == THROWS) run(static_cast<Container*>(c), in, out);
  try {
    run(static_cast<Container*>(c), in, out);
    return 0;
  } catch (const std::exception& e) {
    std::cerr << "Error: " << e.what() << '\n';
    return 1;
  }
}
#if BEHAVIOUR != NO_SYMBOL
EXPORT int32_t AOTInductorModelContainerGetNumInputs(void*, size_t* n) { *n = INPUTS + STATE; return 0; }
#endif
EXPORT int32_t AOTInductorModelContainerGetNumOutputs(void*, size_t* n) { *n = OUTPUTS; return 0; }
EXPORT int32_t AOTInductorModelContainerGetNumConstants(void*, size_t* n) { *n = CONSTANTS; return 0; }
EXPORT int32_t AOTInductorModelContainerGetConstantName(void*, size_t i, const char** out) {
  static std::string names[CONSTANTS + 1];
  if (names[i].empty()) names[i] = name(i);
  *out = names[i].c_str();
  return 0;
}
EXPORT int32_t AOTInductorModelContainerGetConstantOriginalFQN(void*, size_t i, const char** out) {
  static std::string names[CONSTANTS + 1];
  if (names[i].empty()) names[i] = fqn(i);
  *out = names[i].c_str();
  return 0;
}
EXPORT int32_t AOTInductorModelContainerGetConstantFromFolded(void*, size_t, bool* out) { *out = false; return 0; }
EXPORT int32_t AOTInductorModelContainerGetConstantDtype(void*, size_t, int32_t* out) {
  *out = aoti_torch_dtype_float32();
  return 0;
}
EXPORT int32_t AOTInductorModelContainerGetConstantDataSize(void*, size_t, size_t* out) {
  *out = (sizeof(float) * ELEMENTS + 63) / 64 * 64;  // rounded up, as torch does on the CPU
  return 0;
}
EXPORT int32_t AOTInductorModelContainerUpdateUserManagedConstantBufferPairs(
    void* c, const Pair* pairs, size_t n, bool, bool) {
  auto* container = static_cast<Container*>(c);
  for (size_t i = 0; i < CONSTANTS; i++) {
    void* found = nullptr;
    for (size_t k = 0; k < n; k++)
      if (name(i) == pairs[k].name) found = pairs[k].tensor;
    if (!found) {
      std::cerr << "Error: the constant " << name(i) << " is not bound\n";
      return 1;
    }
    container->bound[i] = found;
  }
  return 0;
}

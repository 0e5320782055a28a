/*
 * libprecast: loads compiled PyTorch artifacts of a Precast store and runs them, without Python. Written by cbindgen.
 *
 * Errors. A function that can fail returns NULL, or an error that the caller frees with precast_error_free. It then has
 * set its `out` pointer to NULL, if it has one, and has changed nothing else of the caller's.
 *
 * Ownership. The caller owns the object in `out`, and frees it once with the function of its type:
 * precast_runtime_free, precast_model_free, precast_session_free, precast_outputs_free. Objects can be freed in any
 * order. A returned pointer to const is valid until its object is freed. Arguments are read during the call only.
 *
 * Threads. Any number of threads can use one runtime, one model and one outputs object at once. Calls in one session
 * run one after the other. While a thread frees an object, no other thread may use it.
 *
 * Streams. On CUDA a call returns before its work is done. It works on the default stream of its device, or on the stream
 * that precast_model_run_on and precast_session_set_stream name. Other work of the caller on the tensors is in the same
 * stream, or waits for it by events.
 *
 * The caller's part. A pointer is NULL, or points to a live object, to a text that ends with NUL, or to an array with
 * the count beside it. NULL for a required object or text is an error, never a crash. A freed object must not be used
 * or freed again, and a destroyed stream not be used; the library does not detect it. Texts are UTF-8; paths are the
 * bytes of the file system.
 *
 * The process. A process has one libtorch: its own, or that of precast_libtorch. Nothing is unloaded: dlclose has
 * no effect on this library. After fork() the child must not use it.
 */

#ifndef PRECAST_H
#define PRECAST_H

#include <stddef.h>
#include <stdint.h>

/* DLPack's structures, version 1.0. A dlpack.h that is included before this header has declared them. */
#ifndef DLPACK_DLPACK_H_
#define DLPACK_DLPACK_H_
#define DLPACK_MAJOR_VERSION 1
#define DLPACK_MINOR_VERSION 0
#define DLPACK_FLAG_BITMASK_READ_ONLY (1UL << 0UL)
#define DLPACK_FLAG_BITMASK_IS_COPIED (1UL << 1UL)

typedef struct {
  uint32_t major;
  uint32_t minor;
} DLPackVersion;

/* The kind of a device. Models run on the first two; pinned memory of the host is memory of the CPU. */
#ifdef __cplusplus
typedef enum : int32_t {
#else
typedef enum {
#endif
  kDLCPU = 1,
  kDLCUDA = 2,
  kDLCUDAHost = 3
} DLDeviceType;

typedef struct {
  DLDeviceType device_type;
  int32_t device_id;
} DLDevice;

typedef enum {
  kDLInt = 0,
  kDLUInt = 1,
  kDLFloat = 2,
  kDLBfloat = 4,
  kDLComplex = 5,
  kDLBool = 6
} DLDataTypeCode;

/* The type of an element: a DLDataTypeCode, the bits of a number, and 1 lane. */
typedef struct {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
} DLDataType;

/* Memory with a shape. `strides` count elements, and are NULL for memory without gaps in row-major order. */
typedef struct {
  void *data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t *shape;
  int64_t *strides;
  uint64_t byte_offset;
} DLTensor;

/* A tensor and its owner. The last owner calls `deleter` once. */
typedef struct DLManagedTensorVersioned {
  DLPackVersion version;
  void *manager_ctx;
  void (*deleter)(struct DLManagedTensorVersioned *self);
  uint64_t flags;
  DLTensor dl_tensor;
} DLManagedTensorVersioned;
#endif /* DLPACK_DLPACK_H_ */

#if defined(__GNUC__) || defined(__clang__)
#define PRECAST_MUST_USE __attribute__((warn_unused_result))
#else
#define PRECAST_MUST_USE
#endif

// The kind of an error. Later versions may add kinds.
typedef enum precast_code {
  // An argument is null or out of range, a text is not UTF-8, or an object can't be used so.
  PRECAST_CODE_BAD_ARGUMENT = 1,
  // There is no store, model, release, module or output of this name.
  PRECAST_CODE_NOT_FOUND = 2,
  // The module does not take an input: its number, name, shape, dtype, device or a value.
  PRECAST_CODE_BAD_INPUT = 3,
  // The module has no bucket for the sizes of the inputs.
  PRECAST_CODE_NO_FIT = 4,
  // All slots or sessions are in use, for longer than the caller waits.
  PRECAST_CODE_BUSY = 5,
  // The store, an artifact, the weights, libtorch or a device can't be used.
  PRECAST_CODE_LOAD_FAILED = 6,
  // A call failed while it ran. The model can still be called.
  PRECAST_CODE_CALL_FAILED = 7,
  // There is too little memory, on the host or on the device.
  PRECAST_CODE_OUT_OF_MEMORY = 8,
  // The device answers no more calls in this process, or the process is ending.
  PRECAST_CODE_UNREADY = 9,
  // A bug of Precast. Report it.
  PRECAST_CODE_BUG = 70,
} precast_code;

// The time at which programs are loaded: the field loading of precast_options.
typedef enum precast_loading {
  // All of them before the model is returned.
  PRECAST_LOADING_BEFORE = 0,
  // One program of each module before, the others by a thread of the model.
  PRECAST_LOADING_BACKGROUND = 1,
  // Each program at its first call.
  PRECAST_LOADING_ON_DEMAND = 2,
} precast_loading;

// The programs that run as CUDA graphs: the field graphs of precast_options.
typedef enum precast_graphs {
  // The programs that were built for it.
  PRECAST_GRAPHS_AS_BUILT = 0,
  // Every program that can be captured.
  PRECAST_GRAPHS_ALWAYS = 1,
  // No program.
  PRECAST_GRAPHS_NEVER = 2,
} precast_graphs;

// A loaded model.
typedef struct precast_model precast_model;

// The outputs of one call.
typedef struct precast_outputs precast_outputs;

// A store and the devices of models.
typedef struct precast_runtime precast_runtime;

// The states of a model for one caller.
typedef struct precast_session precast_session;

// An error. The caller frees it with precast_error_free. Later versions may append fields.
typedef struct precast_error {
  // The kind of the error.
  enum precast_code code;
  // The message, never NULL.
  const char *message;
  // A remedy, or an empty text.
  const char *hint;
} precast_error;

// Options of a runtime. 0 in a field is its default, so that `{.size = sizeof(precast_options)}` has all defaults.
//
// Later versions append fields. A program that was compiled with an earlier header sets those to their defaults.
typedef struct precast_options {
  // `sizeof(precast_options)`.
  size_t size;
  // The devices of every model, each a replica: kDLCPU, or kDLCUDA with an ordinal. Default: the CPU.
  const DLDevice *devices;
  // The number of devices.
  size_t device_count;
  // Calls that one program answers at once on one device; others wait. Default: 4.
  size_t instances;
  // Open sessions of a model on one device. Default: 16.
  size_t sessions;
  // The bytes of the states of all open sessions of a model on one device. Default: no limit.
  uint64_t session_limit;
  // The longest wait of a call for others, in milliseconds. Default: without end.
  uint64_t wait_ms;
  // A precast_loading. Default: PRECAST_LOADING_BEFORE.
  int32_t loading;
  // A precast_graphs. Default: PRECAST_GRAPHS_AS_BUILT.
  int32_t graphs;
  // 1 to copy an input that differs only in strides, alignment or device; such an input is an error by default.
  int32_t copy_inputs;
  // 1 to refuse answers of the exported graph in place of an artifact that does not load.
  int32_t no_eager;
  // The limit of uploads of weights to a GPU, in bytes a second. Default: none.
  uint64_t upload_limit;
} precast_options;

// An input or an output of a module. Later versions may append fields.
typedef struct precast_tensor_info {
  // The name of the tensor.
  const char *name;
  // The type of its elements.
  DLDataType dtype;
  // The number of axes.
  int32_t ndim;
  // The size of each axis; -1 where it varies.
  const int64_t *shape;
  // The name of the dimension that the size of each axis depends on; NULL where it does not vary.
  const char *const *dims;
} precast_tensor_info;

// The sizes that one program answers. Later versions may append fields.
typedef struct precast_bucket {
  // The smallest size of each dimension, in the order of the module's dimensions.
  const int64_t *min;
  // The largest size of each dimension; INT64_MAX where only the model limits it. Smaller requests are padded,
  // except in programs for many sizes.
  const int64_t *max;
} precast_bucket;

// A module of a model. Later versions may append fields.
//
// A module that can be called with different sets of inputs has one structure for each.
typedef struct precast_module {
  // The name of the module.
  const char *name;
  // The number of inputs.
  size_t input_count;
  // The inputs, in the order of a call without names.
  const struct precast_tensor_info *const *inputs;
  // The number of outputs.
  size_t output_count;
  // The outputs, in the order of precast_outputs.
  const struct precast_tensor_info *const *outputs;
  // The number of dimensions whose size varies.
  size_t dim_count;
  // The names of these dimensions.
  const char *const *dims;
  // The number of buckets.
  size_t bucket_count;
  // The buckets, the smallest first; programs for many sizes come last.
  const struct precast_bucket *const *buckets;
  // 1 if the module keeps states from call to call: it is called in a session. 0 if not.
  int32_t has_state;
} precast_module;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Frees an error. NULL is ignored.
void precast_error_free(struct precast_error *error);

// Frees a tensor of precast_outputs_export or of another library, by its deleter. NULL and a tensor without a deleter
// are ignored.
void precast_tensor_free(DLManagedTensorVersioned *tensor);

// Returns the version of the library, as "0.1.0".
const char *precast_version(void);

// Opens libtorch for this process: the copy that the process has loaded, or else the copy in `folder`, which is the
// package `torch` or the folder with its libraries.
//
// Call it before the first precast_runtime_open, unless the process has libtorch already. `folder` can be NULL.
// A torch that is newer than the tried ones is refused, unless `untried` is 1.
PRECAST_MUST_USE
struct precast_error *precast_libtorch(const char *folder,
                                       int untried);

// Opens a runtime over the store at a path.
//
// `options` can be NULL.
PRECAST_MUST_USE
struct precast_error *precast_runtime_open(const char *store,
                                           const struct precast_options *options,
                                           struct precast_runtime **out);

// Loads the newest release of a model that this host can run, or a named one as "model@release".
PRECAST_MUST_USE
struct precast_error *precast_model_load(const struct precast_runtime *runtime,
                                         const char *name,
                                         struct precast_model **out);

// Makes every later call of a model use the weights of a release, as "model@release" or the newest one of "model".
//
// The release can be of another model with the same artifacts. Running calls finish with the weights that they began
// with, and open sessions keep theirs. `runtime` has the release in its store, and the devices of the model. After an
// error the model has the weights that it had.
PRECAST_MUST_USE
struct precast_error *precast_model_swap(const struct precast_model *model,
                                         const struct precast_runtime *runtime,
                                         const char *release);

// Frees a runtime. NULL is ignored. Its models stay valid.
void precast_runtime_free(struct precast_runtime *runtime);

// Prevents new calls in this process, and waits up to five seconds for running ones. Returns 1 if all of them ended,
// else 0.
//
// A process whose threads may be in calls at its exit calls it before: libtorch's destructors must not run during a
// call. Later calls fail with PRECAST_CODE_UNREADY.
int precast_shut_down(void);

// Returns a module, counted from 0, valid until the model is freed. NULL beyond the last one.
const struct precast_module *precast_model_module(const struct precast_model *model,
                                                  size_t index);

// Runs a module, and returns its outputs in `*out`.
//
// `inputs` are `count` tensors on a device of the model, or on any with the option copy_inputs. With `names` they can
// have any order, and the names choose between the sets of inputs that a module takes. Without names (NULL) they have
// the module's order. They are only read, and can be freed when the function returns; on CUDA, when the stream of the
// call is done.
//
// Any number of threads can call it at once. On CUDA the call works on the default stream of its device, and returns
// before the work is done.
PRECAST_MUST_USE
struct precast_error *precast_model_run(const struct precast_model *model,
                                        const char *module,
                                        const DLTensor *const *inputs,
                                        const char *const *names,
                                        size_t count,
                                        struct precast_outputs **out);

// Runs a module as precast_model_run does, on a CUDA stream of the caller: a `cudaStream_t`, or NULL for the default
// stream.
//
// The stream is of the device of the inputs; with inputs on the CPU, of the only CUDA device of the model. The caller
// does not destroy it before the outputs are freed. precast_outputs_copy of these outputs works on the same stream.
PRECAST_MUST_USE
struct precast_error *precast_model_run_on(const struct precast_model *model,
                                           const char *module,
                                           const DLTensor *const *inputs,
                                           const char *const *names,
                                           size_t count,
                                           void *stream,
                                           struct precast_outputs **out);

// Waits for the calls of a model on CUDA, and returns the error of a value that was out of bounds in one of them, where
// nobody has looked: see precast_outputs_check. Without this call a later one returns the error, in place of its own.
PRECAST_MUST_USE
struct precast_error *precast_model_check(const struct precast_model *model);

// Loads every program that is not loaded yet, and runs each once, so that no call pays for work that is done once.
PRECAST_MUST_USE
struct precast_error *precast_model_warm_up(const struct precast_model *model);

// Returns the state of a model in `*out`, as a JSON document.
//
// It has the name of the `model`, whether it is `ready`, the counters of its `modules` by bucket and device, the state
// of its `devices`, and the programs that could not be loaded, as `quarantined`. The caller frees the text with
// precast_string_free.
PRECAST_MUST_USE
struct precast_error *precast_model_stats(const struct precast_model *model,
                                          char **out);

// Frees a text that precast_model_stats returned. NULL is ignored.
void precast_string_free(char *text);

// Frees a model. NULL is ignored. Its sessions and outputs stay valid.
void precast_model_free(struct precast_model *model);

// Returns an output, counted from 0, in the order of the module. NULL beyond the last one.
//
// The tensor belongs to the outputs, and is valid until they are freed. It may have gaps: use its strides, or
// precast_outputs_copy. On CUDA it may still be computed: see precast_outputs_check.
const DLTensor *precast_outputs_tensor(const struct precast_outputs *outputs,
                                       size_t index);

// Returns the name of an output, valid until the outputs are freed. NULL beyond the last one.
const char *precast_outputs_name(const struct precast_outputs *outputs,
                                 size_t index);

// Copies the elements of an output into memory of the caller, the last axis moving fastest, from any device.
//
// `bytes` is the size of `data` and must be the size of all elements. On CUDA it waits for the output, on the stream of
// its call, and checks the call as precast_outputs_check does. After an error `data` is unchanged.
PRECAST_MUST_USE
struct precast_error *precast_outputs_copy(const struct precast_outputs *outputs,
                                           size_t index,
                                           void *data,
                                           size_t bytes);

// Gives an output to the caller or to another library, without a copy.
//
// The owner of `*out` calls its deleter once, or precast_tensor_free. The memory is freed when neither the outputs nor
// an exported tensor use it.
PRECAST_MUST_USE
struct precast_error *precast_outputs_export(const struct precast_outputs *outputs,
                                             size_t index,
                                             DLManagedTensorVersioned **out);

// Waits for the device's check of the call's values. After an error the outputs are invalid.
//
// On CUDA, values in the device's memory are checked during the call. Call this function before the tensors of such a
// call are used. In any other case it returns NULL at once, because precast_model_run checks all values.
PRECAST_MUST_USE
struct precast_error *precast_outputs_check(const struct precast_outputs *outputs);

// Frees outputs, and the tensors that precast_outputs_tensor returned. NULL is ignored.
void precast_outputs_free(struct precast_outputs *outputs);

// Opens a session, whose states have their first values.
//
// A model has a limit of open sessions: see the field sessions of precast_options. A session belongs to one caller;
// calls of several threads in one session run one after the other.
PRECAST_MUST_USE
struct precast_error *precast_session_open(const struct precast_model *model,
                                           struct precast_session **out);

// Runs a module on the states of a session, as precast_model_run does.
//
// A call that is refused does not change the states. After a call that failed while it ran, every later call fails
// until precast_session_reset or precast_session_load.
PRECAST_MUST_USE
struct precast_error *precast_session_run(struct precast_session *session,
                                          const char *module,
                                          const DLTensor *const *inputs,
                                          const char *const *names,
                                          size_t count,
                                          struct precast_outputs **out);

// Runs the module `prefill` on the tokens of a prompt, and returns the outputs for the last tokens.
//
// The tokens go through the buckets that they fill, the largest first, and the remaining ones through the module
// `decode` one by one. `more` are the other inputs of both modules, in their order; they are copied. Positions are
// counted.
PRECAST_MUST_USE
struct precast_error *precast_session_prefill(struct precast_session *session,
                                              const int64_t *tokens,
                                              size_t token_count,
                                              const DLTensor *const *more,
                                              size_t more_count,
                                              struct precast_outputs **out);

// Runs the module `decode` on the next token, as precast_session_prefill does.
PRECAST_MUST_USE
struct precast_error *precast_session_decode(struct precast_session *session,
                                             int64_t token,
                                             const DLTensor *const *more,
                                             size_t more_count,
                                             struct precast_outputs **out);

// Returns the number of tokens that precast_session_prefill and precast_session_decode gave the session; 0 for NULL.
size_t precast_session_position(const struct precast_session *session);

// Returns to an earlier position: the tokens after it are dropped.
PRECAST_MUST_USE
struct precast_error *precast_session_seek(struct precast_session *session,
                                           size_t position);

// Gives every state its first value again, also after a call that failed.
PRECAST_MUST_USE
struct precast_error *precast_session_reset(struct precast_session *session);

// Opens another session with copies of the states, as for several answers to one prompt.
PRECAST_MUST_USE
struct precast_error *precast_session_fork(struct precast_session *session,
                                           struct precast_session **out);

// Writes the states that calls have used, and the position, to a safetensors file, whole or not at all.
PRECAST_MUST_USE
struct precast_error *precast_session_save(struct precast_session *session,
                                           const char *file);

// Reads states from a file of precast_session_save; other states get their first values. A file of another model or of
// other weights, or one with a changed bit, is refused and changes nothing.
PRECAST_MUST_USE
struct precast_error *precast_session_load(struct precast_session *session,
                                           const char *file);

// Makes later calls of a session work on a CUDA stream: a `cudaStream_t` of the caller, or NULL for the default stream.
//
// A call waits for earlier calls of the session on other streams. The caller destroys no stream before the session and
// its outputs are freed. On the CPU, only NULL is accepted. A fork begins with the stream of its session.
PRECAST_MUST_USE
struct precast_error *precast_session_set_stream(struct precast_session *session,
                                                 void *stream);

// Frees a session. NULL is ignored.
void precast_session_free(struct precast_session *session);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* PRECAST_H */

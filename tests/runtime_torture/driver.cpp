// Calls the shim as runtime/ffi does, for the sanitizers: containers of artifacts that behave and that don't, from
// several threads at once.
//
//   driver FOLDER all|leak|use-after-free|overread ROUNDS
//                                                      FOLDER has one shared object per behaviour of misbehaving.cpp

#include <ATen/ATen.h>
#include <dlfcn.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "arguments.h"
#include "eager.h"
#include "handles.h"
#include "must.h"

using Ptr = void*;
struct Pair {
  const char* name;
  Ptr tensor;
};
struct Meta {
  const int64_t* sizes;
  const int64_t* strides;
  uint8_t* data;
  uint8_t* storage;
  int64_t storage_bytes;
  uint32_t rank;
  int32_t device_index;
  int8_t dtype;
  int8_t device_type;
  uint8_t flags;
};

extern "C" {
void precast_capture_messages(void (*callback)(const char*));
const char* precast_last_error();
int32_t precast_tensor_meta(const void*, Meta*);
int32_t precast_note_range(const void*, const void* notes, int64_t at, int64_t low, int64_t high, Ptr* clamped);
int32_t precast_note_failed(const void* outcome, const void* notes, int64_t at);
int32_t precast_cuda_wait_for(int32_t device);
Ptr precast_capture_begin();
void precast_capture_end(Ptr before, int32_t code);
int32_t precast_create(Ptr f, Ptr* made, const char* name, int32_t device);
int32_t precast_delete(Ptr f, Ptr);
int32_t precast_run(Ptr f, Ptr, Ptr* in, size_t n_in, Ptr* out, size_t n_out, Ptr stream, Ptr proxy);
int32_t precast_count(Ptr f, Ptr, size_t*);
int32_t precast_name(Ptr f, Ptr, size_t, const char**);
int32_t precast_size(Ptr f, Ptr, size_t, size_t*);
int32_t precast_flag(Ptr f, Ptr, size_t, bool*);
int32_t precast_dtype(Ptr f, Ptr, size_t, int32_t*);
int32_t precast_calls_new(const char* device, size_t inputs, Ptr* made);
int32_t precast_calls_add(Ptr, const char*, const char*, const PrecastGiven*, size_t, const int64_t*, size_t);
int32_t precast_calls_add_cond(Ptr, Ptr, Ptr, const PrecastGiven*, size_t, const int64_t*, size_t);
int32_t precast_calls_finish(Ptr, const int64_t*, size_t);
int32_t precast_calls_run(Ptr, Ptr const* in, size_t n_in, Ptr* out, size_t n_out);
void precast_calls_delete(Ptr);
int32_t precast_bind(Ptr f, Ptr, const Pair*, size_t);
}

// operators.cpp beside this file.
Ptr shared_executor();
uint64_t operators(Ptr shared);
void overread();
extern "C" void precast_operators_delete(Ptr);

namespace {

std::atomic<uint64_t> calls{0};

struct Library {
  Ptr handle;
  Ptr at(const char* name) const {
    Ptr found = dlsym(handle, (std::string("AOTInductorModelContainer") + name).c_str());
    MUST(found);
    return found;
  }
};

const std::vector<std::string> behaviours = {
    "OK", "THROWS", "FAILS", "FAILS_HALF", "NO_OUTPUT", "RETURNS_INPUT", "RETURNS_WEIGHT", "NO_CONTAINER"};

Ptr owned(at::Tensor tensor) { return new at::Tensor(std::move(tensor)); }

// A program's life: made, asked, bound, run with inputs that are stolen or not, bound again, deleted.
void life(const Library& library, const std::string& behaviour) {
  Ptr container = nullptr;
  calls += 1;
  if (precast_create(library.at("CreateWithDevice"), &container, "cpu", -1) != 0) {
    MUST(behaviour == "NO_CONTAINER");
    MUST(std::string(precast_last_error()) == "the fake has no container");
    return;
  }
  size_t n = 0, bytes = 0;
  MUST(precast_count(library.at("GetNumConstants"), container, &n) == 0 && n == 2);
  const char* name = nullptr;
  std::vector<std::string> names;
  for (size_t i = 0; i < n; i++) {
    MUST(precast_name(library.at("GetConstantName"), container, i, &name) == 0);
    MUST(precast_size(library.at("GetConstantDataSize"), container, i, &bytes) == 0 && bytes == 64);
    bool folded = true;
    int32_t dtype = -1;
    MUST(precast_flag(library.at("GetConstantFromFolded"), container, i, &folded) == 0 && !folded);
    MUST(precast_dtype(library.at("GetConstantDtype"), container, i, &dtype) == 0 && dtype == 6);
    names.emplace_back(name);
  }
  calls += 1 + 4 * n;
  // Too few constants: an error with its words.
  const Pair none{"nobody", nullptr};
  MUST(precast_bind(library.at("UpdateUserManagedConstantBufferPairs"), container, &none, 1) != 0);
  MUST(std::strstr(precast_last_error(), "is not bound"));
  Ptr weights[2] = {owned(at::full({1}, 2.0)), owned(at::full({1}, 1.0))};
  const Pair pairs[2] = {{names[0].c_str(), weights[0]}, {names[1].c_str(), weights[1]}};
  const Ptr bind = library.at("UpdateUserManagedConstantBufferPairs");
  MUST(precast_bind(bind, container, pairs, 2) == 0);
  const Ptr input = owned(at::ones({1, 1}));
  const Ptr run = library.at("RunSingleThreaded");
  for (int round = 0; round < 3; round++) {
    Ptr in[2] = {share(input), nullptr}, out[2] = {};
    const int32_t code = precast_run(run, container, in, 1, out, 1, nullptr, nullptr);
    const bool fails = behaviour == "THROWS" || behaviour == "FAILS" || behaviour == "FAILS_HALF";
    MUST((code != 0) == fails);
    if (fails) MUST(std::strlen(precast_last_error()) > 0);
    // Inputs that the callee left are ours, and its outputs too, also before a failure.
    if (in[0]) drop(in[0]);
    if (out[0]) {
      Meta meta;
      MUST(precast_tensor_meta(out[0], &meta) == 0 && meta.rank == 2 && meta.sizes[0] == 1);
      if (behaviour == "OK") MUST(reinterpret_cast<float*>(meta.data)[0] == 3.0f);
      drop(out[0]);
    }
    // The wrong number of inputs is thrown through the C ABI.
    in[0] = share(input), in[1] = share(input);
    MUST(precast_run(run, container, in, 2, out, 1, nullptr, nullptr) != 0);
    for (Ptr left : in)
      if (left) drop(left);
    calls += 8;
  }
  MUST(precast_bind(bind, container, pairs, 2) == 0);
  MUST(precast_delete(library.at("Delete"), container) == 0);
  drop(input);
  for (Ptr weight : weights) drop(weight);
  calls += 6;
}

// Metadata of every kind of tensor there is.
void metas() {
  std::vector<at::Tensor> tensors = {
      at::Tensor(),
      at::ones({}),
      at::ones({1, 2, 3, 4, 5, 6, 7, 8, 9}),
      at::ones({0, 3}),
      at::ones({4, 4}).t(),
      at::ones({1}).expand({1 << 20, 1 << 20}),
      at::ones({8}).slice(0, 1, 7, 2),
      at::ones({4, 4}).to_sparse(),
      at::ones({4, 4}).to_sparse_csr(),
      at::quantize_per_tensor(at::ones({4, 4}), 0.5, 0, at::kQInt8),
      at::ones({4}, at::kComplexFloat).conj(),
      at::imag(at::ones({4}, at::kComplexFloat).conj()),
      at::ones({2, 2}, at::kBool),
      at::_efficientzerotensor({4, 4}),
      at::empty({4, 4}, at::TensorOptions(at::kMeta)),
  };
  for (const auto& tensor : tensors) {
    Meta meta;
    MUST(precast_tensor_meta(&tensor, &meta) == 0);
    MUST(((meta.flags & 1) != 0) == tensor.defined());
    Ptr other = share(&tensor);
    Meta again;
    MUST(precast_tensor_meta(other, &again) == 0 && again.sizes == meta.sizes && again.data == meta.data);
    // Reads all elements that the sizes and strides point to.
    int64_t sum = 0;
    for (uint32_t axis = 0; axis < meta.rank; axis++) sum += meta.sizes[axis] + meta.strides[axis];
    MUST(sum >= 0);
    drop(other);
    calls += 4;
  }
}

// Notes of values: of every integer, of none, of other dtypes, and without room for a note. And the message of a failed
// call of libtorch.
void noted() {
  const at::Tensor notes = at::zeros({3}, at::kLong);
  for (auto dtype : {at::kLong, at::kInt, at::kShort, at::kChar}) {
    const at::Tensor given = at::tensor({5, -7, 90}, dtype);
    Ptr clamped = nullptr;
    MUST(precast_note_range(&given, &notes, 0, 0, 50, &clamped) == 0);
    MUST(notes[0].item<int64_t>() == -7 && notes[1].item<int64_t>() == 90);
    MUST(static_cast<at::Tensor*>(clamped)->equal(at::tensor({5, 0, 50}, dtype)));
    drop(clamped);
  }
  Ptr clamped = nullptr;
  const at::Tensor empty = at::zeros({0, 3}, at::kLong), words = at::ones({2}, at::kComplexFloat);
  MUST(precast_note_range(&empty, &notes, 0, 4, 50, &clamped) == 0 && notes[1].item<int64_t>() == 4);
  drop(clamped);
  clamped = nullptr;
  MUST(precast_note_range(&words, &notes, 0, 0, 50, &clamped) != 0 && clamped == nullptr);
  MUST(precast_note_range(&empty, &notes, 2, 0, 50, &clamped) != 0 && clamped == nullptr);
  const at::Tensor outcome = at::tensor({0, 3}, at::kByte);
  MUST(precast_note_failed(&outcome, &notes, 2) == 0 && notes[2].item<int64_t>() == 1);
  MUST(precast_note_failed(&outcome, &notes, 3) != 0);
  MUST(precast_cuda_wait_for(0) != 0);
  Ptr other = owned(at::ones({4}));
  Ptr before = precast_capture_begin();
  const int32_t code = aoti_torch_copy_(
      reinterpret_cast<AtenTensorHandle>(const_cast<at::Tensor*>(&notes)), static_cast<AtenTensorHandle>(other), 0);
  precast_capture_end(before, code);
  MUST(code != 0 && std::strstr(precast_last_error(), "Exception in aoti_torch: "));
  drop(other);
  calls += 14;
}

// Eager: softmax(x * scale), split in two, the first half or its sum. Right inputs, one of another size, a wrong number
// of outputs, and calls that are refused when they are added.
void interpreted() {
  using precast::Fixed;
  auto value = [](int64_t number) { return Fixed{precast::VALUE, number, 0, nullptr}; };
  auto whole = [](int64_t number) { return Fixed{precast::INT, number, 0, nullptr}; };
  auto begun = [&](size_t inputs) {
    Ptr made = nullptr;
    MUST(precast_calls_new("cpu", inputs, &made) == 0);
    return made;
  };
  auto add = [](Ptr graph, const char* name, const char* overload, std::vector<PrecastGiven> given, std::vector<int64_t> kept) {
    return precast_calls_add(graph, name, overload, given.data(), given.size(), kept.data(), kept.size());
  };
  const Fixed x = value(0), scale = value(1), scaled = value(2), row = whole(-1), two = whole(2);
  auto branch = [&](const char* name) {
    Ptr made = begun(1);
    MUST(add(made, name, "", {{"self", 0, &x, 1}}, {1}) == 0);
    const int64_t output = 1;
    MUST(precast_calls_finish(made, &output, 1) == 0);
    return made;
  };
  Ptr graph = begun(2);
  const PrecastGiven self{"self", 0, &x, 1}, other{"other", 0, &scale, 1};
  MUST(add(graph, "aten::mul", "Tensor", {self, other}, {2}) == 0);
  const PrecastGiven of_scaled{"self", 0, &scaled, 1};
  MUST(add(graph, "aten::split", "Tensor", {of_scaled, {"split_size", 0, &two, 1}, {"dim", 0, &row, 1}}, {-4, 3, -1}) == 0);
  const Fixed chosen[2] = {value(1), value(3)};
  const PrecastGiven given[2] = {{"0", 0, &chosen[0], 1}, {"1", 0, &chosen[1], 1}};
  const int64_t kept = 4;
  MUST(precast_calls_add_cond(graph, branch("aten::relu"), branch("aten::neg"), given, 2, &kept, 1) == 0);
  // Refused: an unregistered operator, a missing argument, an unwritten value, and a branch with other values.
  MUST(add(graph, "lab::none", "", {self}, {5}) != 0);
  MUST(add(graph, "aten::relu", "", {}, {5}) != 0);
  const Fixed later = value(99);
  MUST(add(graph, "aten::relu", "", {{"self", 0, &later, 1}}, {5}) != 0);
  MUST(precast_calls_add_cond(graph, branch("aten::relu"), branch("aten::neg"), given, 1, &kept, 1) != 0);
  MUST(std::strlen(precast_last_error()) > 0);
  const int64_t outputs[2] = {2, 4};
  MUST(precast_calls_finish(graph, outputs, 2) == 0);
  Ptr in[2] = {owned(at::ones({4, 4})), owned(at::full({1}, 2.0))};
  Ptr out[2] = {};
  MUST(precast_calls_run(graph, in, 2, out, 2) == 0);
  MUST(static_cast<at::Tensor*>(out[1])->sum().item<float>() == 16.0f);
  for (Ptr tensor : out) drop(tensor);
  MUST(precast_calls_run(graph, in, 2, out, 1) != 0);
  const Ptr right = in[1];
  in[1] = owned(at::ones({3}));
  MUST(precast_calls_run(graph, in, 2, out, 2) != 0);
  drop(in[1]);
  in[1] = right;
  for (Ptr tensor : in) drop(tensor);
  precast_calls_delete(graph);
  calls += 12;
}

}  // namespace

int main(int argc, char** argv) {
  MUST(argc == 4);
  const std::string folder = argv[1], what = argv[2];
  const long rounds = std::atol(argv[3]);
  precast_capture_messages([](const char*) {});
  precast_capture_messages([](const char*) {});
  std::map<std::string, Library> libraries;
  for (const auto& behaviour : behaviours) {
    Ptr handle = dlopen((folder + "/" + behaviour + ".so").c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!handle) std::fprintf(stderr, "%s\n", dlerror());
    MUST(handle);
    libraries[behaviour] = {handle};
  }
  if (what == "use-after-free") {
    Ptr tensor = owned(at::ones({1}));
    drop(tensor);
    Meta meta;
    precast_tensor_meta(tensor, &meta);
    return 0;
  }
  if (what == "leak") {
    for (long i = 0; i < rounds; i++) share(owned(at::ones({1})));
    return 0;
  }
  if (what == "overread") {
    overread();
    return 0;
  }
  Ptr shared = shared_executor();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; t++)
    threads.emplace_back([&, t] {
      for (long i = t; i < rounds; i += 4) {
        const auto& behaviour = behaviours[static_cast<size_t>(i) % behaviours.size()];
        life(libraries[behaviour], behaviour);
        if (i % 8 == 0) metas(), noted();
        if (i % 64 == 0) interpreted();
        if (i % 16 == 0) calls += operators(shared);
      }
    });
  for (auto& thread : threads) thread.join();
  precast_operators_delete(shared);
  std::printf("calls: %llu\n", static_cast<unsigned long long>(calls.load()));
  return 0;
}

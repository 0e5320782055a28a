// Functions without a C ABI: exceptions caught around calls, a tensor's metadata in one call, device guards, and
// operators.
//
// Every function is extern "C", returns 0 or an error whose text `precast_last_error` has, and throws nothing.

#include <ATen/core/TensorBase.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/aminmax.h>
#include <ATen/ops/stack.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/COW.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/Exception.h>
#include <torch/headeronly/version.h>

#include <cstring>
#include <exception>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <mutex>
#include <streambuf>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

thread_local std::string last_error;
thread_local std::string* sink = nullptr;
thread_local std::string captured;
// Takes the text that a call prints without an error, such as a warning.
void (*report)(const char*) = nullptr;

// An artifact's entry points turn an exception into a return code and print its text on std::cerr. This buffer, put
// under std::cerr once and for good, gives the text to the call that is being made on the same thread and passes
// everything else on.
class PerThread : public std::streambuf {
 public:
  explicit PerThread(std::streambuf* under) : under_(under) {}

 protected:
  int_type overflow(int_type c) override {
    if (traits_type::eq_int_type(c, traits_type::eof())) return traits_type::not_eof(c);
    if (sink) {
      sink->push_back(traits_type::to_char_type(c));
      return c;
    }
    return under_->sputc(traits_type::to_char_type(c));
  }
  std::streamsize xsputn(const char* text, std::streamsize n) override {
    if (sink) {
      sink->append(text, static_cast<size_t>(n));
      return n;
    }
    return under_->sputn(text, n);
  }
  int sync() override { return sink ? 0 : under_->pubsync(); }

 private:
  std::streambuf* under_;
};

struct Capture {
  std::string text;
  std::string* before = sink;
  Capture() { sink = &text; }
  ~Capture() { sink = before; }
};

void keep(const char* what, std::string printed) noexcept {
  try {
    // Text before the error is a message.
    size_t begin = printed.rfind("Error: ", 0) == 0 ? 0 : printed.find("\nError: ");
    if (begin != 0 && begin != std::string::npos) {
      if (report) report(printed.substr(0, begin).c_str());
      printed.erase(0, begin + 1);
    }
    last_error = what;
    if (!printed.empty()) {
      if (!last_error.empty()) last_error += "; ";
      last_error += printed;
    }
    // The artifact puts "Error: " before the text.
    const std::string prefix = "Error: ";
    if (last_error.compare(0, prefix.size(), prefix) == 0) last_error.erase(0, prefix.size());
    while (!last_error.empty() && (last_error.back() == '\n' || last_error.back() == ' ')) last_error.pop_back();
    if (last_error.empty()) last_error = "failed without a message";
  } catch (...) {
  }
}

// Returns 0, the error code of the call, or -1 for an exception that crossed the C ABI.
template <class F>
int32_t guarded(F f) noexcept {
  Capture capture;
  try {
    int32_t code = f();
    if (code != 0) {
      keep("", capture.text);
    } else if (report && !capture.text.empty()) {
      report(capture.text.c_str());
    }
    return code;
  } catch (const c10::Error& e) {
    // The text of `what()` ends with a backtrace of addresses.
    keep(e.what_without_backtrace(), capture.text);
  } catch (const std::exception& e) {
    keep(e.what(), capture.text);
  } catch (...) {
    keep("an exception that is no std::exception", capture.text);
  }
  return -1;
}

const at::Tensor& tensor(const void* handle) { return *static_cast<const at::Tensor*>(handle); }

// Returns a TensorImpl of its own over the same storage, without history; null for sizes that no tensor has: half of
// them were copied before another thread's write and half after it. Throws for a tensor that has no such copy.
//
// Everything that is derived from sizes and strides is computed again, because another thread may write to the original
// while it is copied.
c10::intrusive_ptr<c10::TensorImpl> alias_of(const at::Tensor& t) {
  auto* impl = t.unsafeGetTensorImpl();
  const auto version = impl->is_inference() ? c10::VariableVersion() : impl->version_counter();
  auto own = impl->shallow_copy_and_detach(version, /*allow_tensor_metadata_change=*/true);
  const c10::SmallVector<int64_t, 8> sizes(own->sizes().begin(), own->sizes().end());
  const c10::SmallVector<int64_t, 8> strides(own->strides().begin(), own->strides().end());
  try {
    own->set_sizes_and_strides(sizes, strides, own->storage_offset());
  } catch (const c10::Error&) {
    return {};
  }
  return own;
}

// Returns the keys of plain tensors of a device.
uint64_t plain_keys(c10::DispatchKey device, c10::BackendComponent backend) {
  return (c10::DispatchKeySet(device) | c10::getAutogradRelatedKeySetFromBackend(backend) |
          c10::getAutocastRelatedKeySetFromBackend(backend))
      .raw_repr();
}

// Returns whether a tensor is what its memory on the CPU or a CUDA device says, and no more: not sparse, quantised,
// nested, lazy, of another device, or wrapped by a transform, and no mode of Python sees what is done with it. Memory
// that is copied at its first write is no such memory.
bool is_plain(const at::Tensor& t) {
  static const uint64_t cpu = plain_keys(c10::DispatchKey::CPU, c10::BackendComponent::CPUBit);
  static const uint64_t cuda = plain_keys(c10::DispatchKey::CUDA, c10::BackendComponent::CUDABit);
  const uint64_t keys = t.defined() ? t.key_set().raw_repr() : 0;
  return t.defined() && ((keys & ~cpu) == 0 || (keys & ~cuda) == 0) && t.has_storage() &&
      !t.unsafeGetTensorImpl()->has_symbolic_sizes_strides() && !c10::impl::cow::is_cow_data_ptr(t.storage().data_ptr()) &&
      !c10::impl::dispatch_mode_enabled();
}

// Elements of a tensor up to which it is copied together with others.
constexpr int64_t kCopiedTogether = 32768;

}  // namespace

// For the other files of the shim, where a call's speed does not matter.
int32_t precast_guarded(const std::function<int32_t()>& f) noexcept { return guarded(f); }

extern "C" {

uint64_t precast_abi_version() { return TORCH_ABI_VERSION; }

struct PrecastMeta {
  const int64_t* sizes;
  const int64_t* strides;
  uint8_t* data;
  uint8_t* storage;
  int64_t storage_bytes;
  uint32_t rank;
  int32_t device_index;
  int8_t dtype;
  int8_t device_type;
  // 1 defined, 2 dense and strided, 4 a lazy negation or conjugation is pending, 8 has storage
  uint8_t flags;
};

void precast_capture_messages(void (*to)(const char*)) {
  static std::once_flag once;
  std::call_once(once, [to] {
    report = to;
    std::cerr.rdbuf(new PerThread(std::cerr.rdbuf()));
  });
}

// Begins to capture the text of a call of libtorch's C ABI, which prints the reason of a failure as an artifact does.
// Such calls are not nested.
void* precast_capture_begin() {
  captured.clear();
  std::string* before = sink;
  sink = &captured;
  return before;
}
void precast_capture_end(void* before, int32_t code) {
  sink = static_cast<std::string*>(before);
  if (code != 0) {
    keep("", captured);
  } else if (report && !captured.empty()) {
    report(captured.c_str());
  }
}

const char* precast_last_error() { return last_error.c_str(); }

int32_t precast_tensor_meta(const void* handle, PrecastMeta* out) {
  return guarded([&] {
    const at::Tensor& t = tensor(handle);
    std::memset(out, 0, sizeof *out);
    out->dtype = out->device_type = -1;
    if (!t.defined()) return 0;
    out->flags = 1;
    out->dtype = static_cast<int8_t>(t.scalar_type());
    out->device_type = static_cast<int8_t>(t.device().type());
    out->device_index = t.device().index();
    const bool quantized = t.is_quantized();
    const bool dense = t.layout() == c10::kStrided && !quantized && !t.is_nested() &&
        !t.key_set().has(c10::DispatchKey::FuncTorchGradWrapper) && !t.key_set().has(c10::DispatchKey::FuncTorchBatched);
    if (!dense) return 0;
    out->flags |= 2;
    if (t.is_neg() || t.is_conj()) out->flags |= 4;
    out->rank = static_cast<uint32_t>(t.dim());
    out->sizes = t.sizes().data();
    out->strides = t.strides().data();
    if (t.has_storage()) {
      out->flags |= 8;
      out->storage = static_cast<uint8_t*>(const_cast<void*>(t.storage().data()));
      // A tensor that stands for zeros says how large it would be and has no memory.
      out->storage_bytes = out->storage ? static_cast<int64_t>(t.storage().nbytes()) : 0;
      if (out->storage) out->data = out->storage + t.storage_offset() * static_cast<int64_t>(t.element_size());
    }
    return 0;
  });
}

// Returns a handle whose sizes, strides, offset and storage only the caller's own thread can change: a tensor that other
// handles share gets an alias.
void* precast_tensor_own(const void* handle) {
  const at::Tensor& t = tensor(handle);
  try {
    // The checks refuse other than plain tensors, with any sizes.
    if (t.use_count() <= 1 || t.layout() != c10::kStrided || !t.has_storage()) return new at::Tensor(t);
    if (t.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) return new at::Tensor(t);
    try {
      auto own = alias_of(t);
      return own ? new at::Tensor(std::move(own)) : new at::Tensor();
    } catch (const c10::Error&) {
      return new at::Tensor(t);
    }
  } catch (...) {
    return nullptr;
  }
}

// Returns an alias of a plain tensor without a gradient, null for another.
void* precast_tensor_take(const void* handle) {
  const at::Tensor& t = tensor(handle);
  try {
    if (!is_plain(t) || t.requires_grad()) return nullptr;
    auto own = alias_of(t);
    return own ? new at::Tensor(std::move(own)) : nullptr;
  } catch (...) {
    return nullptr;
  }
}

// Returns the object that `wrap` makes of a plain tensor, null for another. The object has a tensor of its own: an alias
// of one that other handles share or that is a view.
void* precast_tensor_give(const void* handle, void* (*wrap)(const at::TensorBase&)) {
  const at::Tensor& t = tensor(handle);
  try {
    if (!is_plain(t)) return nullptr;
    if (t.use_count() <= 1 && !t.unsafeGetTensorImpl()->autograd_meta()) return wrap(t);
    auto own = alias_of(t);
    return own ? wrap(at::Tensor(std::move(own))) : nullptr;
  } catch (...) {
    return nullptr;
  }
}

// Returns a tensor over memory of the host that `release` frees; null, with the memory freed or not, for numbers that are
// no tensor's. It does the same as `torch_from_blob` in half of its time.
void* precast_tensor_over(void* data, int64_t bytes, int64_t rank, const int64_t* sizes, const int64_t* strides,
                          int32_t dtype, void* owner, void (*release)(void*)) {
  try {
    c10::DataPtr memory(data, owner, release, c10::Device(c10::kCPU));
    c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, std::move(memory), /*allocator=*/nullptr,
                         /*resizable=*/false);
    auto made = c10::make_intrusive<c10::TensorImpl>(
        std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
        c10::scalarTypeToTypeMeta(static_cast<c10::ScalarType>(dtype)));
    const auto n = static_cast<size_t>(rank);
    made->set_sizes_and_strides(c10::IntArrayRef(sizes, n), c10::IntArrayRef(strides, n));
    return new at::Tensor(std::move(made));
  } catch (...) {
    return nullptr;
  }
}

// Copies each tensor into another one of its sizes. On a CUDA device the pairs of one dtype and of equal strides take a few
// launches, however many there are.
int32_t precast_tensors_copy(void* const* to, void* const* from, size_t n) {
  return guarded([&] {
    at::AutoDispatchBelowADInplaceOrView below;
    std::map<at::ScalarType, std::pair<std::vector<at::Tensor>, std::vector<at::Tensor>>> together;
    for (size_t i = 0; i < n; ++i) {
      const at::Tensor& into = tensor(to[i]);
      const at::Tensor& source = tensor(from[i]);
      const bool alike = into.scalar_type() == source.scalar_type() && into.device() == source.device() &&
          into.sizes() == source.sizes() && into.strides() == source.strides() && into.is_non_overlapping_and_dense();
      // One kernel for all of them has few blocks for each: a copy of many elements is quicker by itself.
      if (!alike || into.numel() > kCopiedTogether) {
        into.copy_(source);
        continue;
      }
      auto& group = together[into.scalar_type()];
      group.first.push_back(into);
      group.second.push_back(source);
    }
    for (const auto& [dtype, group] : together) at::_foreach_copy_(group.first, group.second);
    return 0;
  });
}

// Returns the number of tensors with the memory of this one, and itself.
int64_t precast_tensor_uses(const void* handle) { return static_cast<int64_t>(tensor(handle).storage().use_count()); }

// Returns whether this is the only handle of its tensor, and the tensor the only one with its memory.
bool precast_tensor_is_sole(const void* handle) {
  const at::Tensor& own = tensor(handle);
  return own.use_count() == 1 && own.storage().use_count() == 1;
}

// Notes the lowest and highest value of integers at `notes[at]` and the one after, and gives them clamped.
int32_t precast_note_range(const void* handle, const void* notes, int64_t at, int64_t low, int64_t high, void** clamped) {
  return guarded([&] {
    const at::Tensor& given = tensor(handle);
    const at::Tensor& noted = tensor(notes);
    if (given.numel() == 0) {
      noted.narrow(0, at, 2).fill_(low);
      *clamped = new at::Tensor(given);
      return 0;
    }
    at::Tensor least = noted.select(0, at), most = noted.select(0, at + 1);
    at::aminmax_out(least, most, given.to(at::kLong));
    *clamped = new at::Tensor(given.clamp(low, high));
    return 0;
  });
}
// Notes the outcomes of checks from `notes[at]` on: numbers, or whether any element is not zero.
int32_t precast_note_outcomes(void* const* outcomes, size_t count, const void* notes, int64_t at) {
  return guarded([&] {
    std::vector<at::Tensor> numbers;
    for (size_t i = 0; i < count; i++) {
      const at::Tensor& outcome = tensor(outcomes[i]);
      const bool number = outcome.numel() == 1 && outcome.scalar_type() == at::kLong;
      numbers.push_back(number ? outcome.reshape({}) : outcome.any().to(at::kLong));
    }
    at::Tensor to = tensor(notes).narrow(0, at, static_cast<int64_t>(count));
    at::stack_out(to, numbers);
    return 0;
  });
}

// Waits for a device where there is no CUDA half of the shim.
int32_t precast_cuda_wait_for(int32_t device) {
  return guarded([&] {
    at::detail::getCUDAHooks().deviceSynchronize(static_cast<c10::DeviceIndex>(device));
    return 0;
  });
}

using Create = int32_t (*)(void**, size_t, const char*, const char*);
using Delete = int32_t (*)(void*);
using Run = int32_t (*)(void*, void**, size_t, void**, size_t, void*, void*);
using Count = int32_t (*)(void*, size_t*);
using Name = int32_t (*)(void*, size_t, const char**);
using Flag = int32_t (*)(void*, size_t, bool*);
using Dtype = int32_t (*)(void*, size_t, int32_t*);
using Size = int32_t (*)(void*, size_t, size_t*);
using Bind = int32_t (*)(void*, const void*, size_t, bool, bool);

// `device` is below 0 for the CPU. Creating a CUDA container sets the thread's device; the guard sets it back.
int32_t precast_create(Create f, void** container, const char* device_name, int32_t device) {
  return guarded([&] {
    c10::OptionalDeviceGuard guard;
    if (device >= 0) guard.reset_device(c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device)));
    return f(container, 1, device_name, nullptr);
  });
}
int32_t precast_delete(Delete f, void* container) {
  return guarded([&] { return f(container); });
}
int32_t precast_run(Run f, void* container, void** in, size_t n_in, void** out, size_t n_out, void* stream, void* proxy) {
  return guarded([&] { return f(container, in, n_in, out, n_out, stream, proxy); });
}
int32_t precast_count(Count f, void* container, size_t* out) {
  return guarded([&] { return f(container, out); });
}
int32_t precast_name(Name f, void* container, size_t i, const char** out) {
  return guarded([&] { return f(container, i, out); });
}
int32_t precast_flag(Flag f, void* container, size_t i, bool* out) {
  return guarded([&] { return f(container, i, out); });
}
int32_t precast_dtype(Dtype f, void* container, size_t i, int32_t* out) {
  return guarded([&] { return f(container, i, out); });
}
int32_t precast_size(Size f, void* container, size_t i, size_t* out) {
  return guarded([&] { return f(container, i, out); });
}
int32_t precast_bind(Bind f, void* container, const void* pairs, size_t n) {
  return guarded([&] { return f(container, pairs, n, false, true); });
}

}  // extern "C"

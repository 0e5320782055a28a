// The CUDA half of the shim: a shared object of its own, loaded after libtorch_cuda, whose symbols it uses.
//
// Every function is extern "C", returns 0 or 1 with a text in `precast_cuda_last_error`, and throws nothing.

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/grad_mode.h>
#include <ATen/cuda/CUDAGraph.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <cuda_runtime_api.h>

#include <algorithm>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "upload.h"

namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;
using Stream = c10::cuda::CUDAStream;
using Index = c10::DeviceIndex;

thread_local std::string last_error;

template <class F>
int32_t guarded(F f) noexcept {
  try {
    f();
    return 0;
  } catch (const std::exception& e) {
    try {
      last_error = e.what();
      // libtorch appends a C++ stack; the first line has the message.
      last_error.erase(std::min(last_error.find('\n'), last_error.size()));
    } catch (...) {
    }
  } catch (...) {
    try {
      last_error = "an exception that is no std::exception";
    } catch (...) {
    }
  }
  return 1;
}

struct Graph {
  at::cuda::CUDAGraph graph;
  c10::cuda::MempoolId_t pool;
  Index device;

  // Cleans up after a capture that can't begin or end. Torch leaves the stream in capture, and both allocators in the
  // pool with a filter of this graph's: they would call a filter that is gone, and no other capture could begin in the
  // pool.
  void abandon() {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const auto stream = c10::cuda::getCurrentCUDAStream(device).stream();
    if (cudaStreamIsCapturing(stream, &status) == cudaSuccess && status != cudaStreamCaptureStatusNone) {
      cudaGraph_t unfinished = nullptr;
      cudaStreamEndCapture(stream, &unfinished);
      if (unfinished) cudaGraphDestroy(unfinished);
    }
    // An allocator that is not in the pool any more throws. Then the graph itself gives up its use of the pool.
    try {
      allocator::endAllocateToPool(device, pool);
      allocator::releasePool(device, pool);
    } catch (...) {
    }
    try {
      auto* host = at::getHostAllocator(at::kCUDA);
      host->end_allocate_to_pool(pool);
      host->release_pool(pool);
    } catch (...) {
    }
    (void)cudaGetLastError();
  }
};

// The memory of cuBLAS's workspaces of one device that graphs write. The pool is never released, and has no other memory.
struct Workspaces {
  c10::cuda::MempoolId_t pool = at::cuda::graph_pool_handle();
  // An allocator enters a pool once at a time.
  std::mutex entered;

  // Has torch make the workspaces of this thread and its current stream, if there are none.
  void make(Index device) {
    const at::NoGradGuard no_grad;
    const auto stream = c10::cuda::getCurrentCUDAStream(device).stream();
    const auto a = at::zeros({8, 8}, at::TensorOptions().device(at::Device(at::kCUDA, device)));
    auto product = at::zeros_like(a);
    const auto bias = a.select(0, 0);
    std::lock_guard<std::mutex> held(entered);
    allocator::beginAllocateToPool(device, pool, [stream](cudaStream_t other) { return other == stream; });
    try {
      at::mm_out(product, a, a);
      // Of cublasLt, where torch has another one for it.
      at::addmm_out(product, bias, a, a);
    } catch (...) {
      allocator::endAllocateToPool(device, pool);
      throw;
    }
    allocator::endAllocateToPool(device, pool);
  }
};

// Pinned memory for a small tensor, and the event of its copy.
struct Slip {
  int64_t* numbers = nullptr;
  cudaEvent_t event = nullptr;
  Index device = 0;

  ~Slip() {
    const c10::cuda::CUDAStreamCaptureModeGuard others(cudaStreamCaptureModeRelaxed);
    if (event) {
      cudaEventSynchronize(event);
      cudaEventDestroy(event);
    }
    if (numbers) cudaFreeHost(numbers);
    (void)cudaGetLastError();
  }
};

// Returns what the process keeps of this kind for one device, made once.
template <class Kept>
Kept& kept(Index device) {
  // Never freed: CUDA may be gone before statics are, and graphs may be replayed until the process ends.
  static auto* all = new std::map<Index, Kept>;
  static auto* lock = new std::mutex;
  std::lock_guard<std::mutex> held(*lock);
  return (*all)[device];
}

}  // namespace

#define EXPORT __attribute__((visibility("default")))

extern "C" {

EXPORT const char* precast_cuda_last_error() { return last_error.c_str(); }

// Reports an error that stays: later answers of such a context are invalid. Other errors are forgotten.
EXPORT int32_t precast_cuda_health(int32_t device) {
  return guarded([&] {
    c10::cuda::CUDAGuard guard(static_cast<Index>(device));
    (void)cudaGetLastError();
    const cudaError_t code = cudaStreamQuery(c10::cuda::getCurrentCUDAStream(static_cast<Index>(device)).stream());
    if (code != cudaErrorNotReady) C10_CUDA_CHECK(code);
  });
}

// Waits until everything on the device is done.
EXPORT int32_t precast_cuda_synchronize(int32_t device) {
  return guarded([&] {
    c10::cuda::CUDAGuard guard(static_cast<Index>(device));
    C10_CUDA_CHECK(cudaDeviceSynchronize());
  });
}

// The memory of torch's allocator, held and in use, and of the device.
EXPORT int32_t precast_cuda_memory(
    int32_t device, uint64_t* allocated, uint64_t* peak, uint64_t* reserved, uint64_t* free, uint64_t* total) {
  return guarded([&] {
    c10::cuda::CUDAGuard guard(static_cast<Index>(device));
    const auto stats = allocator::getDeviceStats(static_cast<Index>(device));
    *allocated = static_cast<uint64_t>(stats.allocated_bytes[0].current);
    *peak = static_cast<uint64_t>(stats.allocated_bytes[0].peak);
    *reserved = static_cast<uint64_t>(stats.reserved_bytes[0].current);
    size_t f = 0, t = 0;
    C10_CUDA_CHECK(cudaMemGetInfo(&f, &t));
    *free = f;
    *total = t;
  });
}

EXPORT int32_t precast_cuda_reset_peak(int32_t device) {
  return guarded([&] { allocator::resetPeakStats(static_cast<Index>(device)); });
}

// Gives the unused memory of torch's allocator back to the driver, on every device.
EXPORT int32_t precast_cuda_release_cached() {
  return guarded([] { allocator::emptyCache(); });
}

// Streams. A handle is a copy of torch's own stream object; streams of its pool and those made here live as long as the
// process, since allocators may remember them.

EXPORT int32_t precast_cuda_stream_new(int32_t device, void** made) {
  return guarded([&] { *made = new Stream(c10::cuda::getStreamFromPool(false, static_cast<Index>(device))); });
}
// A stream outside torch's pool, which would make all of its streams at once.
EXPORT int32_t precast_cuda_stream_apart(int32_t device, void** made) {
  return guarded([&] {
    const auto index = static_cast<Index>(device);
    c10::cuda::CUDAGuard guard(index);
    cudaStream_t raw = nullptr;
    C10_CUDA_CHECK(cudaStreamCreateWithFlags(&raw, cudaStreamNonBlocking));
    *made = new Stream(c10::cuda::getStreamFromExternal(raw, index));
  });
}
EXPORT int32_t precast_cuda_stream_current(int32_t device, void** made) {
  return guarded([&] { *made = new Stream(c10::cuda::getCurrentCUDAStream(static_cast<Index>(device))); });
}
// The raw stream of torch that is current on this thread, with no allocation. Artifacts launch through the driver,
// which needs the device's context on the thread: a new thread has none, and torch's own guards don't set the device
// that is current already. So it is set here, once a thread; the current device does not change.
EXPORT int32_t precast_cuda_stream_current_raw(int32_t device, void** raw) {
  thread_local bool bound = false;
  return guarded([&] {
    if (!bound) {
      int now = 0;
      C10_CUDA_CHECK(cudaGetDevice(&now));
      C10_CUDA_CHECK(cudaSetDevice(now));
      bound = true;
    }
    *raw = c10::cuda::getCurrentCUDAStream(static_cast<Index>(device)).stream();
  });
}
EXPORT int32_t precast_cuda_stream_external(int32_t device, void* raw, void** made) {
  return guarded([&] {
    *made = new Stream(c10::cuda::getStreamFromExternal(static_cast<cudaStream_t>(raw), static_cast<Index>(device)));
  });
}
EXPORT void precast_cuda_stream_delete(void* stream) { delete static_cast<Stream*>(stream); }
EXPORT void* precast_cuda_stream_raw(void* stream) { return static_cast<Stream*>(stream)->stream(); }
EXPORT int32_t precast_cuda_stream_sync(void* stream) {
  return guarded([&] { static_cast<Stream*>(stream)->synchronize(); });
}
// Later work of `waiter` waits for the present work of `other`.
EXPORT int32_t precast_cuda_wait(void* waiter, void* other, int32_t device) {
  return guarded([&] {
    c10::cuda::CUDAGuard guard(static_cast<Index>(device));
    cudaEvent_t event = nullptr;
    C10_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    cudaError_t code = cudaEventRecord(event, static_cast<cudaStream_t>(other));
    if (code == cudaSuccess) code = cudaStreamWaitEvent(static_cast<cudaStream_t>(waiter), event, 0);
    // Destroying an event that is waited for is deferred by CUDA until it is done.
    cudaEventDestroy(event);
    C10_CUDA_CHECK(code);
  });
}
// Pinned memory for the numbers that a small tensor had, and the event of their copy.
EXPORT int32_t precast_cuda_slip_new(int32_t device, size_t count, void** made) {
  return guarded([&] {
    c10::cuda::CUDAGuard guard(static_cast<Index>(device));
    // Another thread may be capturing, and such calls would end that.
    const c10::cuda::CUDAStreamCaptureModeGuard others(cudaStreamCaptureModeRelaxed);
    auto slip = std::make_unique<Slip>();
    slip->device = static_cast<Index>(device);
    C10_CUDA_CHECK(cudaEventCreateWithFlags(&slip->event, cudaEventDisableTiming));
    C10_CUDA_CHECK(cudaHostAlloc(reinterpret_cast<void**>(&slip->numbers), count * sizeof(int64_t), 0));
    *made = slip.release();
  });
}
// Copies a tensor on the current stream, unless that is being captured.
EXPORT int32_t precast_cuda_slip_send(void* self, const void* handle, size_t count, bool* sent) {
  return guarded([&] {
    auto& slip = *static_cast<Slip*>(self);
    const at::Tensor& from = *static_cast<const at::Tensor*>(handle);
    TORCH_CHECK(
        from.scalar_type() == at::kLong && from.is_contiguous() && static_cast<size_t>(from.numel()) == count,
        "a slip has another size");
    c10::cuda::CUDAGuard guard(slip.device);
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(slip.device).stream();
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    C10_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
    *sent = status == cudaStreamCaptureStatusNone;
    if (!*sent) return;
    C10_CUDA_CHECK(
        cudaMemcpyAsync(slip.numbers, from.const_data_ptr(), count * sizeof(int64_t), cudaMemcpyDeviceToHost, stream));
    C10_CUDA_CHECK(cudaEventRecord(slip.event, stream));
  });
}
EXPORT int32_t precast_cuda_slip_ready(void* self, bool* ready) {
  return guarded([&] {
    const c10::cuda::CUDAStreamCaptureModeGuard others(cudaStreamCaptureModeRelaxed);
    const cudaError_t code = cudaEventQuery(static_cast<Slip*>(self)->event);
    *ready = code == cudaSuccess;
    if (code == cudaErrorNotReady) {
      (void)cudaGetLastError();
    } else {
      C10_CUDA_CHECK(code);
    }
  });
}
// Waits for the copy.
EXPORT int32_t precast_cuda_slip_read(void* self, int64_t* to, size_t count) {
  return guarded([&] {
    const auto& slip = *static_cast<Slip*>(self);
    const c10::cuda::CUDAStreamCaptureModeGuard others(cudaStreamCaptureModeRelaxed);
    C10_CUDA_CHECK(cudaEventSynchronize(slip.event));
    std::copy_n(slip.numbers, count, to);
  });
}
EXPORT void precast_cuda_slip_delete(void* self) { delete static_cast<Slip*>(self); }
// Keeps a tensor's memory from being used again, after its release, until the work of `stream` up to then is done.
EXPORT int32_t precast_cuda_stream_uses(void* stream, const void* tensor) {
  return guarded([&] {
    const auto& t = *static_cast<const at::Tensor*>(tensor);
    allocator::recordStream(t.storage().data_ptr(), *static_cast<Stream*>(stream));
  });
}
EXPORT int32_t precast_cuda_scope_enter(void* stream, void** scope) {
  return guarded([&] { *scope = new c10::cuda::CUDAStreamGuard(*static_cast<Stream*>(stream)); });
}
EXPORT void precast_cuda_scope_leave(void* scope) { delete static_cast<c10::cuda::CUDAStreamGuard*>(scope); }

// Graphs.

EXPORT int32_t precast_cuda_pool_new(uint64_t* a, uint64_t* b) {
  return guarded([&] {
    const auto pool = at::cuda::graph_pool_handle();
    *a = pool.first;
    *b = pool.second;
  });
}
// Makes cuBLAS's workspaces of this thread and its current stream, for graphs that are captured on them. A graph has their
// addresses. Torch frees them when other code asks for that, as `torch.compile` does before it captures: then nothing but
// the next workspace of this stream gets their memory.
EXPORT int32_t precast_cuda_workspaces(int32_t device) {
  return guarded([&] {
    const auto index = static_cast<Index>(device);
    c10::cuda::CUDAGuard guard(index);
    kept<Workspaces>(index).make(index);
  });
}
// Begins to capture this thread's launches on its current stream, which must not be the default one.
EXPORT int32_t precast_cuda_graph_begin(uint64_t a, uint64_t b, int32_t device, void** made) {
  return guarded([&] {
    auto graph = std::make_unique<Graph>();
    graph->pool = {a, b};
    graph->device = static_cast<Index>(device);
    try {
      // Thread-local: other threads may allocate and synchronise meanwhile.
      graph->graph.capture_begin(graph->pool, cudaStreamCaptureModeThreadLocal);
    } catch (...) {
      graph->abandon();
      throw;
    }
    *made = graph.release();
  });
}
EXPORT int32_t precast_cuda_graph_end(void* graph) {
  auto* g = static_cast<Graph*>(graph);
  return guarded([&] {
    try {
      g->graph.capture_end();
    } catch (...) {
      g->abandon();
      throw;
    }
  });
}
EXPORT int32_t precast_cuda_graph_replay(void* graph) {
  auto* g = static_cast<Graph*>(graph);
  return guarded([&] {
    c10::cuda::CUDAGuard guard(g->device);
    g->graph.replay();
  });
}
EXPORT void precast_cuda_graph_delete(void* graph) {
  try {
    delete static_cast<Graph*>(graph);
  } catch (...) {
  }
}

// Copies pieces of an open file into a device block of `bytes`; done when it returns. `pieces` are sorted and do not
// overlap. Up to `threads` read the file. `limit` is in bytes a second; 0 is none. Returns an error of reading the file
// as errno, negated.
EXPORT int32_t precast_cuda_upload(
    int32_t device, uint8_t* block, uint64_t bytes, int file, const uploads::Piece* pieces, size_t n, size_t threads,
    uint64_t limit) {
  int unread = 0;
  const int32_t failed = guarded([&] {
    const auto index = static_cast<Index>(device);
    c10::cuda::CUDAGuard guard(index);
    // Earlier work on torch's stream may still use memory that the allocator has just given to `block`.
    const cudaStream_t after = c10::cuda::getCurrentCUDAStream(index).stream();
    const uploads::Outcome outcome =
        uploads::upload(kept<uploads::Staging>(index), after, block, bytes, file, pieces, n, threads, limit);
    C10_CUDA_CHECK(outcome.cuda);
    unread = outcome.file;
  });
  return failed ? failed : -unread;
}

}  // extern "C"

// The CUDA half of the shim: a shared object of its own, loaded after libtorch_cuda, whose symbols it uses.
//
// Every function is extern "C", returns 0 or 1 with a text in `precast_cuda_last_error`, and throws nothing.

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

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
      // libtorch appends a C++ stack; the first line says what happened.
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
};

// Staging memory for uploads: pinned once, kept for the next upload. One upload at a time uses it.
constexpr size_t kChunk = 1 << 20;
constexpr size_t kThreads = 8;
struct Staging {
  std::mutex busy;
  uint8_t* memory = nullptr;
};
Staging& staging() {
  static Staging* one = new Staging;  // never freed: CUDA may be gone before statics are
  return *one;
}

struct Piece {
  uint64_t to;
  const uint8_t* from;
  uint64_t bytes;
};

// Copies what lies in [start, start + bytes) of the device block into `chunk`.
void gather(uint8_t* chunk, uint64_t start, uint64_t bytes, const Piece* pieces, size_t n) {
  const uint64_t end = start + bytes;
  const Piece* piece = std::upper_bound(
      pieces, pieces + n, start, [](uint64_t at, const Piece& p) { return at < p.to + p.bytes; });
  for (; piece != pieces + n && piece->to < end; ++piece) {
    const uint64_t from = std::max(start, piece->to);
    const uint64_t to = std::min(end, piece->to + piece->bytes);
    std::memcpy(chunk + (from - start), piece->from + (from - piece->to), to - from);
  }
}

}  // namespace

#define EXPORT __attribute__((visibility("default")))

extern "C" {

EXPORT const char* precast_cuda_last_error() { return last_error.c_str(); }

EXPORT int32_t precast_cuda_capability(int32_t device, int32_t* major, int32_t* minor) {
  return guarded([&] {
    C10_CUDA_CHECK(cudaDeviceGetAttribute(major, cudaDevAttrComputeCapabilityMajor, device));
    C10_CUDA_CHECK(cudaDeviceGetAttribute(minor, cudaDevAttrComputeCapabilityMinor, device));
  });
}

// Reports an error that stays: such a context answers nothing right any more. One that does not stay is forgotten.
EXPORT int32_t precast_cuda_health(int32_t device) {
  return guarded([&] {
    c10::cuda::CUDAGuard guard(static_cast<Index>(device));
    (void)cudaGetLastError();
    const cudaError_t code = cudaStreamQuery(c10::cuda::getCurrentCUDAStream(static_cast<Index>(device)).stream());
    if (code != cudaErrorNotReady) C10_CUDA_CHECK(code);
  });
}

// What torch's allocator holds and uses, and what the device has.
EXPORT int32_t precast_cuda_memory(
    int32_t device, uint64_t* allocated, uint64_t* reserved, uint64_t* free, uint64_t* total) {
  return guarded([&] {
    c10::cuda::CUDAGuard guard(static_cast<Index>(device));
    const auto stats = allocator::getDeviceStats(static_cast<Index>(device));
    *allocated = static_cast<uint64_t>(stats.allocated_bytes[0].current);
    *reserved = static_cast<uint64_t>(stats.reserved_bytes[0].current);
    size_t f = 0, t = 0;
    C10_CUDA_CHECK(cudaMemGetInfo(&f, &t));
    *free = f;
    *total = t;
  });
}

// Streams. A handle is a copy of torch's own stream object; pool streams live as long as the process.

EXPORT int32_t precast_cuda_stream_new(int32_t device, void** made) {
  return guarded([&] { *made = new Stream(c10::cuda::getStreamFromPool(false, static_cast<Index>(device))); });
}
EXPORT int32_t precast_cuda_stream_current(int32_t device, void** made) {
  return guarded([&] { *made = new Stream(c10::cuda::getCurrentCUDAStream(static_cast<Index>(device))); });
}
// The raw stream torch works on now on this thread, with no allocation. Artifacts launch through the driver, which needs
// the device's context on the thread: a thread that has not chosen a device has none, and torch's own guards don't choose
// one that is the current device already. So it is chosen here, once a thread; the current device stays what it is.
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
// What `waiter` gets from now on waits for what `other` has until now.
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
// Keeps a tensor's memory from being given to another until what `stream` has until its release is done.
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
// Begins to capture what this thread puts on its current stream, which must not be the default one.
EXPORT int32_t precast_cuda_graph_begin(uint64_t a, uint64_t b, int32_t device, void** made) {
  return guarded([&] {
    auto graph = std::make_unique<Graph>();
    graph->pool = {a, b};
    graph->device = static_cast<Index>(device);
    // Thread-local: other threads may allocate and synchronise meanwhile.
    graph->graph.capture_begin(graph->pool, cudaStreamCaptureModeThreadLocal);
    *made = graph.release();
  });
}
EXPORT int32_t precast_cuda_graph_end(void* graph) {
  auto* g = static_cast<Graph*>(graph);
  return guarded([&] {
    try {
      g->graph.capture_end();
    } catch (...) {
      // A capture that went wrong must neither stay on the stream nor keep the allocator in its pool.
      cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
      const auto stream = c10::cuda::getCurrentCUDAStream(g->device).stream();
      if (cudaStreamIsCapturing(stream, &status) == cudaSuccess && status != cudaStreamCaptureStatusNone) {
        cudaGraph_t unfinished = nullptr;
        cudaStreamEndCapture(stream, &unfinished);
        if (unfinished) cudaGraphDestroy(unfinished);
      }
      try {
        allocator::endAllocateToPool(g->device, g->pool);
      } catch (...) {
      }
      (void)cudaGetLastError();
      throw;
    }
  });
}
EXPORT int32_t precast_cuda_graph_replay(void* graph) {
  return guarded([&] { static_cast<Graph*>(graph)->graph.replay(); });
}
EXPORT void precast_cuda_graph_delete(void* graph) {
  try {
    delete static_cast<Graph*>(graph);
  } catch (...) {
  }
}

// Copies pieces of host memory into a device block of `bytes` through pinned memory, with several threads; done when it
// returns. `pieces` are sorted and do not overlap. `limit` is in bytes a second; 0 is none.
EXPORT int32_t precast_cuda_upload(
    int32_t device, uint8_t* block, uint64_t bytes, const Piece* pieces, size_t n, uint64_t limit) {
  return guarded([&] {
    c10::cuda::CUDAGuard guard(static_cast<Index>(device));
    auto& shared = staging();
    std::lock_guard<std::mutex> lock(shared.busy);
    if (!shared.memory) {
      void* memory = nullptr;
      C10_CUDA_CHECK(cudaHostAlloc(&memory, kThreads * 2 * kChunk, cudaHostAllocPortable));
      shared.memory = static_cast<uint8_t*>(memory);
    }
    // What torch put on its stream may still use memory the allocator has just given to `block`.
    C10_CUDA_CHECK(cudaStreamSynchronize(c10::cuda::getCurrentCUDAStream(static_cast<Index>(device)).stream()));
    const uint64_t chunks = (bytes + kChunk - 1) / kChunk;
    std::atomic<uint64_t> next{0};
    std::atomic<int> failed{cudaSuccess};
    const auto begin = std::chrono::steady_clock::now();
    const auto work = [&](size_t thread) noexcept {
      const auto check = [&](cudaError_t code) {
        if (code != cudaSuccess) failed.store(code);
        return code == cudaSuccess;
      };
      cudaStream_t stream = nullptr;
      cudaEvent_t done[2] = {};
      if (check(cudaSetDevice(device)) && check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)) &&
          check(cudaEventCreateWithFlags(&done[0], cudaEventDisableTiming)) &&
          check(cudaEventCreateWithFlags(&done[1], cudaEventDisableTiming))) {
        for (size_t turn = 0; failed.load() == cudaSuccess; turn++) {
          const uint64_t at = next.fetch_add(1) * kChunk;
          if (at >= bytes) break;
          const uint64_t size = std::min<uint64_t>(kChunk, bytes - at);
          if (limit) {
            const auto due = begin + std::chrono::duration<double>(static_cast<double>(at) / static_cast<double>(limit));
            std::this_thread::sleep_until(std::chrono::time_point_cast<std::chrono::steady_clock::duration>(due));
          }
          uint8_t* chunk = shared.memory + (thread * 2 + turn % 2) * kChunk;
          // The event of a chunk never recorded counts as done.
          if (!check(cudaEventSynchronize(done[turn % 2]))) break;
          gather(chunk, at, size, pieces, n);
          if (!check(cudaMemcpyAsync(block + at, chunk, size, cudaMemcpyHostToDevice, stream))) break;
          if (!check(cudaEventRecord(done[turn % 2], stream))) break;
        }
        check(cudaStreamSynchronize(stream));
      }
      for (auto event : done)
        if (event) cudaEventDestroy(event);
      if (stream) cudaStreamDestroy(stream);
    };
    const size_t count = std::min<uint64_t>(kThreads, std::max<uint64_t>(chunks, 1));
    std::vector<std::thread> threads;
    for (size_t i = 1; i < count; i++) threads.emplace_back(work, i);
    work(0);
    for (auto& thread : threads) thread.join();
    C10_CUDA_CHECK(static_cast<cudaError_t>(failed.load()));
  });
}

}  // extern "C"

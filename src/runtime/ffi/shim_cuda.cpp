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
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
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

struct Piece {
  uint64_t to;
  const uint8_t* from;
  uint64_t bytes;
};

// Copies what lies in [start, start + bytes) of the device block to `to`.
void gather(uint8_t* to, uint64_t start, uint64_t bytes, const Piece* pieces, size_t n) {
  const uint64_t end = start + bytes;
  const Piece* piece = std::upper_bound(
      pieces, pieces + n, start, [](uint64_t at, const Piece& p) { return at < p.to + p.bytes; });
  for (; piece != pieces + n && piece->to < end; ++piece) {
    const uint64_t from = std::max(start, piece->to);
    const uint64_t until = std::min(end, piece->to + piece->bytes);
    std::memcpy(to + (from - start), piece->from + (from - piece->to), until - from);
  }
}

// Uploads. Copies from pinned memory are fastest when they are large and on one stream: on an H200 4 MiB at a time reach
// 97 % of one copy of everything, 1 MiB 88 %, and a second stream halves that. One thread fills pinned memory slower than
// the bus empties it, and a chunk that one thread fills keeps the bus waiting at the start. So several threads fill slices
// of one chunk after the other, and one sends the chunks: CUDA's own locks make it slower when more threads call it.
constexpr size_t kChunk = 4 << 20;
constexpr size_t kSlice = 512 << 10;
constexpr size_t kSlots = 4;
constexpr uint64_t kPerChunk = kChunk / kSlice;
// A thread takes as long to start as copying a few MB does.
constexpr uint64_t kPerThread = 8 << 20;
constexpr uint64_t kThreads = 7;

// What uploads to one device use: made once and kept, because pinning memory takes longer than copying it. One upload at
// a time has it.
struct Staging {
  std::mutex busy;
  uint8_t* memory = nullptr;  // kSlots chunks
  cudaStream_t stream = nullptr;
  cudaEvent_t sent[kSlots] = {};

  void prepare() {
    if (!stream) C10_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (auto& event : sent)
      if (!event) C10_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    if (!memory) {
      void* made = nullptr;
      C10_CUDA_CHECK(cudaHostAlloc(&made, kSlots * kChunk, cudaHostAllocPortable));
      memory = static_cast<uint8_t*>(made);
    }
  }
};

Staging& staging(int32_t device) {
  // Never freed: CUDA may be gone before statics are.
  static auto* all = new std::map<int32_t, Staging>;
  static auto* lock = new std::mutex;
  std::lock_guard<std::mutex> held(*lock);
  return (*all)[device];
}

class Upload {
 public:
  Upload(Staging& with, uint8_t* block, uint64_t bytes, const Piece* pieces, size_t n, uint64_t limit)
      : with_(with), block_(block), bytes_(bytes), pieces_(pieces), n_(n), limit_(limit),
        slices_((bytes + kSlice - 1) / kSlice), left_((bytes + kChunk - 1) / kChunk) {
    for (size_t chunk = 0; chunk < left_.size(); chunk++)
      left_[chunk] = static_cast<uint32_t>(std::min(kPerChunk, slices_ - chunk * kPerChunk));
  }

  void run() {
    // Throttled, it is to disturb nobody: this thread copies alone.
    const uint64_t cores = std::max(1u, std::thread::hardware_concurrency());
    const uint64_t count = limit_ ? 0 : std::min({kThreads, cores - 1, bytes_ / kPerThread});
    std::vector<std::thread> threads;
    threads.reserve(kThreads);
    try {
      for (uint64_t i = 0; i < count; i++)
        threads.emplace_back([this] {
          while (next_.load() < slices_ && !stop_.load())
            if (!fill_next()) std::this_thread::yield();
        });
    } catch (const std::system_error&) {
      // Those there are will do.
    }
    const cudaError_t sent = send();
    stop_.store(true);
    for (auto& thread : threads) thread.join();
    // Also after a failure: what was sent must have left the staging memory.
    const cudaError_t arrived = cudaStreamSynchronize(with_.stream);
    C10_CUDA_CHECK(sent);
    C10_CUDA_CHECK(arrived);
  }

 private:
  // Sends each chunk when it is full, and fills slices meanwhile.
  cudaError_t send() noexcept {
    uint64_t free = 0;
    for (size_t chunk = 0; chunk < left_.size(); chunk++) {
      while (left_[chunk].load(std::memory_order_acquire) != 0) {
        if (free < chunk) {
          const cudaError_t code = cudaEventQuery(with_.sent[free % kSlots]);
          if (code == cudaSuccess) {
            freed_.store(++free, std::memory_order_release);
            continue;
          }
          if (code != cudaErrorNotReady) return code;
          (void)cudaGetLastError();
        }
        if (!fill_next()) std::this_thread::yield();
      }
      const uint64_t at = chunk * kChunk;
      const uint8_t* slot = with_.memory + (chunk % kSlots) * kChunk;
      cudaError_t code = cudaMemcpyAsync(
          block_ + at, slot, std::min<uint64_t>(kChunk, bytes_ - at), cudaMemcpyHostToDevice, with_.stream);
      if (code == cudaSuccess) code = cudaEventRecord(with_.sent[chunk % kSlots], with_.stream);
      if (code != cudaSuccess) return code;
    }
    return cudaSuccess;
  }

  // Fills the next slice, if there is one and the chunk that had its slot before has left.
  bool fill_next() noexcept {
    uint64_t slice = next_.load();
    do {
      if (slice >= slices_ || slice / kPerChunk >= freed_.load(std::memory_order_acquire) + kSlots) return false;
    } while (!next_.compare_exchange_weak(slice, slice + 1));
    const uint64_t at = slice * kSlice;
    if (limit_) {
      const std::chrono::duration<double> due(static_cast<double>(at) / static_cast<double>(limit_));
      std::this_thread::sleep_until(begin_ + std::chrono::duration_cast<std::chrono::steady_clock::duration>(due));
    }
    const uint64_t chunk = slice / kPerChunk;
    uint8_t* slot = with_.memory + (chunk % kSlots) * kChunk;
    gather(slot + at % kChunk, at, std::min<uint64_t>(kSlice, bytes_ - at), pieces_, n_);
    left_[chunk].fetch_sub(1, std::memory_order_release);
    return true;
  }

  Staging& with_;
  uint8_t* const block_;
  const uint64_t bytes_;
  const Piece* const pieces_;
  const size_t n_;
  const uint64_t limit_;
  const uint64_t slices_;
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  std::atomic<uint64_t> next_{0};
  // How many chunks have left their slots, of those that were sent.
  std::atomic<uint64_t> freed_{0};
  std::atomic<bool> stop_{false};
  // For each chunk how many slices are not filled yet.
  std::vector<std::atomic<uint32_t>> left_;
};

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

// Waits until everything on the device is done.
EXPORT int32_t precast_cuda_synchronize(int32_t device) {
  return guarded([&] {
    c10::cuda::CUDAGuard guard(static_cast<Index>(device));
    C10_CUDA_CHECK(cudaDeviceSynchronize());
  });
}

// What torch's allocator holds and uses, and what the device has.
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
    auto& with = staging(device);
    std::lock_guard<std::mutex> lock(with.busy);
    with.prepare();
    // What torch put on its stream may still use memory the allocator has just given to `block`.
    C10_CUDA_CHECK(cudaEventRecord(with.sent[0], c10::cuda::getCurrentCUDAStream(static_cast<Index>(device)).stream()));
    C10_CUDA_CHECK(cudaStreamWaitEvent(with.stream, with.sent[0], 0));
    Upload(with, block, bytes, pieces, n, limit).run();
  });
}

}  // extern "C"

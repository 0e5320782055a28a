// The CUDA half of the shim, for the sanitizers: with torch's own headers, and stand-ins for libtorch_cuda and CUDA.
// Every call of theirs fails once, and after each nothing may be left: no graph, event or stream, and no allocator that
// still asks a destroyed graph.
//
//   graphs all | dangles

#include "must.h"

#include <ATen/ATen.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include <cstring>
#include <map>
#include <optional>
#include <stdexcept>
#include <vector>

extern "C" {
const char* precast_cuda_last_error();
int32_t precast_cuda_health(int32_t);
int32_t precast_cuda_synchronize(int32_t);
int32_t precast_cuda_memory(int32_t, uint64_t*, uint64_t*, uint64_t*, uint64_t*, uint64_t*);
int32_t precast_cuda_reset_peak(int32_t);
int32_t precast_cuda_release_cached();
int32_t precast_cuda_stream_new(int32_t, void**);
int32_t precast_cuda_stream_apart(int32_t, void**);
int32_t precast_cuda_stream_current(int32_t, void**);
int32_t precast_cuda_stream_current_raw(int32_t, void**);
int32_t precast_cuda_stream_external(int32_t, void*, void**);
void precast_cuda_stream_delete(void*);
void* precast_cuda_stream_raw(void*);
int32_t precast_cuda_stream_sync(void*);
int32_t precast_cuda_wait(void*, void*, int32_t);
int32_t precast_cuda_stream_uses(void*, const void*);
int32_t precast_cuda_scope_enter(void*, void**);
void precast_cuda_scope_leave(void*);
int32_t precast_cuda_pool_new(uint64_t*, uint64_t*);
int32_t precast_cuda_graph_begin(uint64_t, uint64_t, int32_t, void**);
int32_t precast_cuda_graph_end(void*);
int32_t precast_cuda_graph_replay(void*);
void precast_cuda_graph_delete(void*);
}

namespace {

using c10::MempoolId_t;
using c10::cuda::CUDAStream;
namespace caching = c10::cuda::CUDACachingAllocator;

int64_t calls = 0;
// The call that fails, counted from now; none when negative.
int64_t fails = -1;
bool failing() {
  calls++;
  return fails >= 0 && fails-- == 0;
}
void step() {
  if (failing()) throw std::runtime_error("CUDA error: out of memory\nand a stack");
}
cudaError_t code() { return failing() ? cudaErrorMemoryAllocation : cudaSuccess; }

[[noreturn]] void never() {
  MUST(!"asked for");
  std::abort();
}

int events = 0, graphs = 0;
bool capturing = false;

c10::StreamId current = 0;
CUDAStream stream(c10::StreamId id) {
  return CUDAStream(CUDAStream::UNCHECKED, c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kCUDA, 0), id));
}

// The behaviour of both of torch's allocators in captures.
template <class Stream>
struct Pools {
  std::map<MempoolId_t, int> uses;
  std::vector<std::pair<MempoolId_t, std::function<bool(Stream)>>> underway;

  void begin(MempoolId_t pool, std::function<bool(Stream)> filter) {
    step();
    uses[pool]++;
    for (const auto& one : underway) {
      if (one.first == pool) throw std::runtime_error("already recording to mempool_id");
    }
    underway.emplace_back(pool, std::move(filter));
  }
  void end(MempoolId_t pool) {
    for (auto one = underway.begin(); one != underway.end(); ++one) {
      if (one->first != pool) continue;
      underway.erase(one);
      return;
    }
    throw std::runtime_error("not currently recording to mempool_id");
  }
  void release(MempoolId_t pool) { MUST(--uses.at(pool) >= 0); }
  // Every allocation asks every filter.
  void allocate(Stream stream) const {
    for (const auto& one : underway) (void)one.second(stream);
  }
  bool idle() const {
    for (const auto& one : uses) {
      if (one.second != 0) return false;
    }
    return underway.empty();
  }
};

struct Caching final : caching::CUDAAllocator {
  Pools<cudaStream_t> pools;

  void beginAllocateToPool(c10::DeviceIndex, MempoolId_t pool, std::function<bool(cudaStream_t)> filter) override {
    pools.begin(pool, std::move(filter));
  }
  void endAllocateToPool(c10::DeviceIndex, MempoolId_t pool) override { pools.end(pool); }
  void releasePool(c10::DeviceIndex, MempoolId_t pool) override { pools.release(pool); }
  void emptyCache(MempoolId_t) override { step(); }
  void recordStream(const c10::DataPtr&, CUDAStream) override { step(); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    step();
    return {};
  }
  void resetPeakStats(c10::DeviceIndex) override { step(); }

  // Nobody asks for these.
  void recordHistory(
      bool, caching::CreateContextFn, size_t, caching::RecordContext, bool, const std::vector<std::string>&) override {
    never();
  }
  caching::SnapshotInfo snapshot(MempoolId_t, bool) override { never(); }
  c10::DataPtr allocate(size_t) override { never(); }
  void copy_data(void*, const void*, std::size_t) const override { never(); }
  bool initialized() override { never(); }
  void resetAccumulatedStats(c10::DeviceIndex) override { never(); }
  void* raw_alloc(size_t) override { never(); }
  void* raw_alloc_with_stream(size_t, cudaStream_t) override { never(); }
  void raw_delete(void*) override { never(); }
  void init(int) override { never(); }
  double getMemoryFraction(c10::DeviceIndex) override { never(); }
  void setMemoryFraction(double, c10::DeviceIndex) override { never(); }
  std::vector<caching::StreamSegmentSize> getExpandableSegmentSizes(c10::DeviceIndex) override { never(); }
  void enable(bool) override { never(); }
  bool isEnabled() const override { never(); }
  void cacheInfo(c10::DeviceIndex, size_t*) override { never(); }
  void* getBaseAllocation(void*, size_t*) override { never(); }
  caching::ShareableHandle shareIpcHandle(void*) override { never(); }
  std::shared_ptr<void> getIpcDevPtr(std::string) override { never(); }
  void attachOutOfMemoryObserver(caching::OutOfMemoryObserver) override { never(); }
  void attachAllocatorTraceTracker(caching::AllocatorTraceTracker) override { never(); }
  void enablePeerAccess(c10::DeviceIndex, c10::DeviceIndex) override { never(); }
  cudaError_t memcpyAsync(void*, int, const void*, int, size_t, cudaStream_t, bool) override { never(); }
  std::shared_ptr<caching::AllocatorState> getCheckpointState(c10::DeviceIndex, MempoolId_t) override { never(); }
  caching::CheckpointDelta setCheckpointPoolState(c10::DeviceIndex, std::shared_ptr<caching::AllocatorState>) override {
    never();
  }
  std::string name() override { return "made here"; }
} on_device;

struct Host final : at::HostAllocator {
  Pools<c10::Stream> pools;

  void begin_allocate_to_pool(MempoolId_t pool, std::function<bool(c10::Stream)> filter) override {
    pools.begin(pool, std::move(filter));
  }
  void end_allocate_to_pool(MempoolId_t pool) override { pools.end(pool); }
  void release_pool(MempoolId_t pool) override { pools.release(pool); }

  c10::DataPtr allocate(size_t) override { never(); }
  void copy_data(void*, const void*, std::size_t) const override { never(); }
  bool record_event(void*, void*, c10::Stream) override { never(); }
  void empty_cache() override { never(); }
  at::HostStats get_stats() override { never(); }
  void reset_accumulated_stats() override { never(); }
  void reset_peak_stats() override { never(); }
} on_host;

// Somebody takes memory, on the device and on the host.
void allocate() {
  on_device.pools.allocate(stream(current).stream());
  on_host.pools.allocate(stream(current).unwrap());
}

}  // namespace

namespace c10::cuda {
namespace CUDACachingAllocator {
std::atomic<CUDAAllocator*> allocator{&on_device};
}
DeviceIndex device_count() noexcept { return 1; }
cudaError_t GetDevice(DeviceIndex* now) {
  *now = 0;
  return code();
}
cudaError_t SetDevice(DeviceIndex, const bool) { return code(); }
cudaError_t MaybeSetDevice(DeviceIndex) { return cudaSuccess; }
DeviceIndex ExchangeDevice(DeviceIndex) {
  step();
  return 0;
}
void c10_cuda_check_implementation(const int32_t err, const char*, const char*, const uint32_t, const bool) {
  if (err != cudaSuccess) throw std::runtime_error("CUDA error: out of memory");
}
CUDAStream getStreamFromPool(const bool, DeviceIndex) {
  step();
  return stream(5);
}
CUDAStream getStreamFromPool(const int, DeviceIndex) { never(); }
CUDAStream getStreamFromExternal(cudaStream_t raw, DeviceIndex) {
  step();
  return stream(reinterpret_cast<c10::StreamId>(raw));
}
CUDAStream getDefaultCUDAStream(DeviceIndex) { return stream(0); }
CUDAStream getCurrentCUDAStream(DeviceIndex) { return stream(current); }
void setCurrentCUDAStream(CUDAStream stream) { current = stream.id(); }
cudaStream_t CUDAStream::stream() const { return reinterpret_cast<cudaStream_t>(id()); }
bool CUDAStream::query() const { return true; }
void CUDAStream::synchronize() const { step(); }
}  // namespace c10::cuda

// As of torch 2.11, but for random generators.
namespace at::cuda {
MempoolId_t graph_pool_handle() {
  step();
  return {0, 7};
}
CUDAGraph::CUDAGraph(bool keep) : capture_stream_(c10::cuda::getCurrentCUDAStream()), keep_graph_(keep) {}
CUDAGraph::~CUDAGraph() {
  if (capture_ended_) {
    on_device.pools.release(mempool_id_);
    on_host.pools.release(mempool_id_);
  }
  if (has_graph_exec_) graphs--;
}
void CUDAGraph::capture_begin(MempoolId_t pool, cudaStreamCaptureMode) {
  step();
  capture_dev_ = 0;
  mempool_id_ = pool;
  caching::beginAllocateToPool(0, pool, [this](cudaStream_t) { return capture_id_ == 9; });
  at::getHostAllocator(at::kCUDA)->begin_allocate_to_pool(pool, [this](c10::Stream) { return capture_id_ == 9; });
  step();
  capturing = true;
  step();
  capture_id_ = 9;
}
void CUDAGraph::capture_end() {
  // A capture that was spoilt ends too.
  capturing = false;
  step();
  caching::endAllocateToPool(0, mempool_id_);
  at::getHostAllocator(at::kCUDA)->end_allocate_to_pool(mempool_id_);
  capture_ended_ = true;
  MUST(!keep_graph_);
  step();
  graph_exec_ = reinterpret_cast<cudaGraphExec_t>(this);
  has_graph_exec_ = true;
  graphs++;
}
void CUDAGraph::replay() { step(); }
}  // namespace at::cuda

extern "C" {
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "made to fail"; }
cudaError_t cudaStreamQuery(cudaStream_t) { return code(); }
cudaError_t cudaDeviceSynchronize() { return code(); }
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = *total = 1;
  return code();
}
cudaError_t cudaGetDevice(int* now) {
  *now = 0;
  return code();
}
cudaError_t cudaSetDevice(int) { return code(); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* made, unsigned int) {
  const auto failed = code();
  if (failed == cudaSuccess) *made = reinterpret_cast<cudaEvent_t>(static_cast<intptr_t>(++events));
  return failed;
}
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return code(); }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned int) { return code(); }
cudaError_t cudaEventDestroy(cudaEvent_t) {
  events--;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
  capturing = false;
  *graph = nullptr;
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
// uploads.cpp is about these.
cudaError_t cudaEventElapsedTime(float*, cudaEvent_t, cudaEvent_t) { never(); }
cudaError_t cudaEventQuery(cudaEvent_t) { never(); }
cudaError_t cudaEventSynchronize(cudaEvent_t) { never(); }
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { never(); }
cudaError_t cudaFreeHost(void*) { never(); }
cudaError_t cudaHostAlloc(void**, size_t, unsigned int) { never(); }
cudaError_t cudaHostRegister(void*, size_t, unsigned int) { never(); }
cudaError_t cudaMemcpyAsync(void*, const void*, size_t, cudaMemcpyKind, cudaStream_t) { never(); }
cudaError_t cudaStreamSynchronize(cudaStream_t) { never(); }

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* made, unsigned int) {
  *made = reinterpret_cast<cudaStream_t>(7);
  return code();
}
}

namespace {

bool good(int32_t code) {
  if (code != 0) {
    MUST(std::strlen(precast_cuda_last_error()) > 0 && !std::strchr(precast_cuda_last_error(), '\n'));
  }
  return code == 0;
}

// A graph as runtime/ffi makes, uses and drops it. Returns whether all of it went well.
bool graph() {
  uint64_t a = 0, b = 0;
  if (!good(precast_cuda_pool_new(&a, &b))) return false;
  void* made = nullptr;
  const bool begun = good(precast_cuda_graph_begin(a, b, 0, &made));
  allocate();
  if (!begun) {
    MUST(!made && !capturing);
    return false;
  }
  bool all = good(precast_cuda_graph_end(made));
  allocate();
  MUST(!capturing);
  for (int i = 0; i < 2; i++) all = all && good(precast_cuda_graph_replay(made));
  precast_cuda_graph_delete(made);
  allocate();
  return all;
}

bool streams() {
  void *made = nullptr, *apart = nullptr, *now = nullptr, *external = nullptr, *scope = nullptr, *raw = nullptr;
  bool all = good(precast_cuda_stream_new(0, &made));
  all = all && good(precast_cuda_stream_apart(0, &apart));
  if (all) MUST(precast_cuda_stream_raw(apart) == reinterpret_cast<void*>(7));
  all = all && good(precast_cuda_stream_current(0, &now));
  all = all && good(precast_cuda_stream_current_raw(0, &raw));
  all = all && good(precast_cuda_stream_external(0, reinterpret_cast<void*>(3), &external));
  all = all && precast_cuda_stream_raw(external) == reinterpret_cast<void*>(3);
  all = all && good(precast_cuda_scope_enter(made, &scope));
  if (all) MUST(current == 5);
  const at::Tensor tensor = at::zeros({4});
  all = all && good(precast_cuda_stream_uses(made, &tensor));
  all = all && good(precast_cuda_wait(precast_cuda_stream_raw(made), raw, 0));
  all = all && good(precast_cuda_stream_sync(made));
  if (scope) precast_cuda_scope_leave(scope);
  MUST(current == 0 && events == 0);
  for (void* one : {made, apart, now, external}) precast_cuda_stream_delete(one);
  return all;
}

bool questions() {
  uint64_t bytes[5];
  return good(precast_cuda_health(0)) && good(precast_cuda_synchronize(0)) &&
      good(precast_cuda_memory(0, bytes, bytes + 1, bytes + 2, bytes + 3, bytes + 4)) &&
      good(precast_cuda_reset_peak(0)) && good(precast_cuda_release_cached());
}

// Has every call fail in turn, and does it once more after each.
int64_t each(bool (*body)()) {
  int64_t made = 0;
  for (int64_t at = 0;; at++) {
    fails = at;
    body();
    made += calls;
    const bool over = fails >= 0;
    fails = -1;
    calls = 0;
    if (!body()) {
      std::fprintf(stderr, "after call %ld failed: %s\n", static_cast<long>(at), precast_cuda_last_error());
      std::_Exit(3);
    }
    made += calls;
    calls = 0;
    MUST(events == 0 && graphs == 0 && !capturing);
    MUST(on_device.pools.idle() && on_host.pools.idle());
    if (over) return made;
  }
}

}  // namespace

int main(int, char** arguments) {
  at::setHostAllocator(at::kCUDA, &on_host, 255);
  if (std::strcmp(arguments[1], "dangles") == 0) {
    // The control: a filter that is asked after its graph was destroyed.
    auto made = std::make_unique<at::cuda::CUDAGraph>();
    made->capture_begin({0, 7}, cudaStreamCaptureModeThreadLocal);
    made.reset();
    allocate();
    return 0;
  }
  const int64_t made = each(graph) + each(streams) + each(questions);
  std::printf("calls: %ld\n", static_cast<long>(made));
}

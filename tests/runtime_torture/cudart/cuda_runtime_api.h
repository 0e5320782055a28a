// The functions of the CUDA runtime that uploads use, without a device: a thread for each stream copies in order and
// later, as a device does. A copy that reads during a write, or too late, is a race that ThreadSanitizer sees.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

enum cudaError_t { cudaSuccess = 0, cudaErrorMemoryAllocation = 2, cudaErrorUnknown = 999 };
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1 };
constexpr unsigned cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2;
constexpr unsigned cudaHostAllocPortable = 1;

namespace fake {

// The call that fails next, counted down by the calling thread; none below zero.
inline thread_local int64_t fails = -1;
// Events say that they are done before they are: a defect of the device.
inline std::atomic<bool> early{false};

inline bool failed() { return fails >= 0 && fails-- == 0; }

struct Event {
  std::atomic<uint64_t> recorded{0}, done{0};
};

struct Stream {
  std::mutex lock;
  std::condition_variable more, less;
  std::deque<std::function<void()>> work;
  bool busy = false;

  Stream() {
    std::thread([this] {
      for (std::unique_lock<std::mutex> held(lock);;) {
        more.wait(held, [this] { return !work.empty(); });
        const auto next = std::move(work.front());
        work.pop_front();
        busy = true;
        held.unlock();
        next();
        held.lock();
        busy = false;
        less.notify_all();
      }
    }).detach();
  }
  void put(std::function<void()> what) {
    std::lock_guard<std::mutex> held(lock);
    work.push_back(std::move(what));
    more.notify_one();
  }
  void wait() {
    std::unique_lock<std::mutex> held(lock);
    less.wait(held, [this] { return work.empty() && !busy; });
  }
};

}  // namespace fake

using cudaStream_t = fake::Stream*;
using cudaEvent_t = fake::Event*;

// Streams and events are never destroyed, as in the shim.
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* made, unsigned) {
  if (fake::failed()) return cudaErrorUnknown;
  *made = new fake::Stream;
  return cudaSuccess;
}
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* made, unsigned) {
  if (fake::failed()) return cudaErrorUnknown;
  *made = new fake::Event;
  return cudaSuccess;
}
inline cudaError_t cudaHostAlloc(void** made, size_t bytes, unsigned) {
  if (fake::failed()) return cudaErrorMemoryAllocation;
  *made = std::malloc(bytes);
  return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  if (fake::failed()) return cudaErrorUnknown;
  const uint64_t turn = event->recorded.fetch_add(1) + 1;
  if (stream) {
    stream->put([=] { event->done.store(turn, std::memory_order_release); });
  } else {
    event->done.store(turn);
  }
  return cudaSuccess;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (fake::failed()) return cudaErrorUnknown;
  if (fake::early) return cudaSuccess;
  while (event->done.load(std::memory_order_acquire) < event->recorded) std::this_thread::yield();
  return cudaSuccess;
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) {
  return fake::failed() ? cudaErrorUnknown : cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  if (fake::failed()) return cudaErrorUnknown;
  stream->put([=] {
    if (bytes % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(bytes % 100));
    std::memcpy(to, from, bytes);
  });
  return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  stream->wait();
  return cudaSuccess;
}

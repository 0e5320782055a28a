// Pieces of a file into a block of device memory, through pinned memory that several threads fill.
//
// The file is read, not mapped: a map's page faults make copying it take half as long again. The bus should be the limit,
// and three things keep it waiting:
//
// - The start. One small copy begins as soon as its bytes are there; what follows grows to what the bus likes best: on an
//   H200, 4 MiB at a time reach 96 % of one copy of everything. A thread takes as long to start as copying a few MB does,
//   and pinning memory takes longer than copying it: both are kept.
// - The caches. The device reads bytes that lie dirty in a core's own cache at half the speed. So they are written around
//   the caches, where the processor can. That is two more passes through memory, which limit a long upload: so after the
//   first round of the ring threads read straight into it, and what they read is sent when they are some MiB further,
//   when it has left their own caches, and hardly the one they share. On a machine of 16 cores with an H200, 604 MB reach
//   88 % of one pinned copy that way, sent at once with eight threads 37 %, and 75 % around the caches
//   (benches/results/load-h200.json).
// - CUDA's locks, which make calls slower when more threads make them, and a second stream, which halves the speed. So
//   one thread sends, on one stream, and the others never call CUDA.
//
// Nothing here needs more than the CUDA runtime, so that the sanitizers can run it without a device.
#pragma once

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace uploads {

// A part of the file and where it goes in the block.
struct Piece {
  uint64_t to;
  uint64_t from;
  uint64_t bytes;
};

// What ended an upload early: an error of CUDA's, or one of reading the file, as errno has it. None: all is there.
struct Outcome {
  cudaError_t cuda = cudaSuccess;
  int file = 0;
};

using Copy = void (*)(uint8_t* to, const uint8_t* from, uint64_t bytes);

#if defined(__x86_64__)
__attribute__((target("avx2"))) inline void copy_around_caches(uint8_t* to, const uint8_t* from, uint64_t bytes) {
  constexpr uint64_t kStep = 4 * sizeof(__m256i);
  const uint64_t unaligned = (32 - reinterpret_cast<uintptr_t>(to) % 32) % 32;
  uint64_t at = std::min(bytes, unaligned);
  std::memcpy(to, from, at);
  for (; at + kStep <= bytes; at += kStep) {
    const auto* source = reinterpret_cast<const __m256i*>(from + at);
    auto* target = reinterpret_cast<__m256i*>(to + at);
    const __m256i a = _mm256_loadu_si256(source), b = _mm256_loadu_si256(source + 1);
    const __m256i c = _mm256_loadu_si256(source + 2), d = _mm256_loadu_si256(source + 3);
    _mm256_stream_si256(target, a);
    _mm256_stream_si256(target + 1, b);
    _mm256_stream_si256(target + 2, c);
    _mm256_stream_si256(target + 3, d);
  }
  // Such stores are ordered by nothing else, a release among them.
  _mm_sfence();
  std::memcpy(to + at, from + at, bytes - at);
}
#endif

// Returns how this processor writes around its caches; null where it can't.
inline Copy around_caches() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return copy_around_caches;
#endif
  return nullptr;
}

// Lets a moment pass, without the chance that another thread has this core for milliseconds.
inline void pause() {
#if defined(__x86_64__)
  for (int i = 0; i < 8; i++) _mm_pause();
#else
  std::this_thread::yield();
#endif
}

// Threads that help with one job at a time and sleep between jobs, for as long as the process lives. Whoever has a job
// works on it too and depends on none of them: there may be fewer than asked for, in a forked child there are none, and
// one that wakes too late finds the job closed and has missed nothing.
class Helpers {
 public:
  static constexpr size_t kMost = 15;

  Helpers() {
    for (auto& wake : wake_) sem_init(&wake, 0, 0);
  }

  // Lets up to `count` threads call `job`, until `close`. Returns how many may.
  size_t open(const std::function<void()>& job, size_t count) noexcept {
    count = std::min(count, kMost);
    try {
      for (; made_ < count; made_++) std::thread([this, index = made_] { live(index); }).detach();
    } catch (const std::system_error&) {
      // Those there are will do.
    }
    job_ = &job;
    wanted_.store(std::min(count, made_));
    state_.fetch_and(~kClosed);
    wake_below(0);
    return std::min(count, made_);
  }

  // Returns when no thread is in the job, and none can enter it any more.
  void close() noexcept {
    state_.fetch_or(kClosed);
    while (state_.load() != kClosed) std::this_thread::yield();
  }

 private:
  static constexpr uint32_t kClosed = 1u << 31;

  // To wake one takes some microseconds: each that wakes wakes three others.
  void wake_below(size_t parent) noexcept {
    const size_t end = std::min(3 * parent + 3, wanted_.load());
    for (size_t child = 3 * parent; child < end; child++) sem_post(&wake_[child]);
  }

  void live(size_t index) noexcept {
    // Signals are for the program's own threads.
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, nullptr);
    pthread_setname_np(pthread_self(), "precast-upload");
    for (;;) {
      while (sem_wait(&wake_[index]) != 0) {
      }
      wake_below(index + 1);
      if (!(state_.fetch_add(1) & kClosed)) (*job_)();
      state_.fetch_sub(1);
    }
  }

  sem_t wake_[kMost];
  size_t made_ = 0;
  const std::function<void()>* job_ = nullptr;
  std::atomic<size_t> wanted_{0};
  // How many threads are in the job, or are about to see that it is closed.
  std::atomic<uint32_t> state_{kClosed};
};

struct Sizes {
  uint64_t ring = 32 << 20;
  uint64_t slice = 128 << 10;  // what a thread fills at a time
  uint64_t most = 4 << 20;     // what is copied to the device at a time
  uint64_t least = 2 << 20;    // the same while the device has little to do; the first copies are smaller
  uint64_t lag = 8 << 20;      // how much more is read before what went through the caches is sent
  uint64_t rounds = 4;         // of the ring, before an upload is a long one
};

// What uploads to one device use, one at a time. It is never destroyed: its threads sleep in it.
struct Staging {
  static constexpr uint64_t kCopies = 64;  // under way at once

  std::mutex busy;
  Sizes sizes;
  Copy around = around_caches();
  Helpers helpers;
  uint8_t* memory = nullptr;
  cudaStream_t stream = nullptr;
  cudaEvent_t sent[kCopies] = {};

  cudaError_t prepare(size_t threads) noexcept {
    cudaError_t code = cudaSuccess;
    if (!stream) code = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    for (auto& event : sent)
      if (code == cudaSuccess && !event) code = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    if (code == cudaSuccess && !memory) code = pin(threads);
    return code;
  }

 private:
  // Most of the time that pinning takes goes to clearing the memory: several threads do that, a huge page at a time.
  cudaError_t pin(size_t threads) noexcept {
    constexpr uint64_t kHuge = 2 << 20;
    const uint64_t mapped = sizes.ring + kHuge;
    void* made = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (made == MAP_FAILED) return cudaErrorMemoryAllocation;
    auto* start = static_cast<uint8_t*>(made);
    start += (kHuge - reinterpret_cast<uintptr_t>(start) % kHuge) % kHuge;
    (void)madvise(start, sizes.ring, MADV_HUGEPAGE);
    // After a fork, this process might write to copies of pages while the device reads the old ones.
    (void)madvise(start, sizes.ring, MADV_DONTFORK);
    std::atomic<uint64_t> next{0};
    const std::function<void()> touch = [&] {
      constexpr uint64_t kPage = 4 << 10;
      for (uint64_t at; (at = next.fetch_add(kHuge)) < sizes.ring;)
        for (uint64_t page = at; page < std::min(at + kHuge, sizes.ring); page += kPage)
          *static_cast<volatile uint8_t*>(start + page) = 0;
    };
    helpers.open(touch, threads);
    touch();
    helpers.close();
    const cudaError_t code = cudaHostRegister(start, sizes.ring, cudaHostRegisterPortable);
    if (code == cudaSuccess) {
      memory = start;
      return code;
    }
    (void)munmap(made, mapped);
    (void)cudaGetLastError();
    // Where a driver pins no memory of others, it may have some of its own.
    void* own = nullptr;
    const cudaError_t second = cudaHostAlloc(&own, sizes.ring, cudaHostAllocPortable);
    if (second == cudaSuccess) memory = static_cast<uint8_t*>(own);
    return second;
  }
};

// One upload, counted in slices: slice i of the block passes through place i % ring of the pinned memory.
class Upload {
 public:
  Upload(
      Staging& with, uint8_t* block, uint64_t bytes, int file, const Piece* pieces, size_t n, uint64_t limit)
      : with_(with), block_(block), bytes_(bytes), file_(file), pieces_(pieces), n_(n), limit_(limit),
        slice_(with.sizes.slice), slices_((bytes + slice_ - 1) / slice_), ring_(with.sizes.ring / slice_),
        cached_(!limit && slices_ >= with.sizes.rounds * ring_ ? ring_ : slices_), filled_(slices_) {}

  Outcome run(size_t threads) noexcept {
    // In so short a time more are not faster, and in the way of the thread that sends.
    if (cached_ == slices_) threads = std::min(threads, kShort);
    const std::function<void()> help = [this] {
      helped_.store(true);
      while (next_.load() < slices_ && !stop_.load())
        if (!fill_next()) std::this_thread::yield();
    };
    const cudaError_t sent = send(with_.helpers.open(help, threads));
    stop_.store(true);
    // Also after a failure: what was sent must have left the staging memory.
    const cudaError_t arrived = cudaStreamSynchronize(with_.stream);
    with_.helpers.close();
    return {sent == cudaSuccess ? arrived : sent, failed_.load()};
  }

 private:
  static constexpr size_t kMany = 8, kShort = 10;

  // Sends what is filled, until all is or a thread could not read. Fills too until somebody helps, so that the start waits
  // for no thread to wake, and where so few help that the bus would wait for them.
  cudaError_t send(size_t helpers) noexcept {
    const uint64_t most = with_.sizes.most / slice_, lag = with_.sizes.lag / slice_;
    uint64_t least = 1;
    uint64_t ready = 0, sent = 0;
    uint64_t arrived = 0, copies = 0;  // copies between them are under way
    uint64_t ends[Staging::kCopies];
    while (sent < slices_ && !failed_.load()) {
      while (arrived < copies) {
        const cudaError_t code = cudaEventQuery(with_.sent[arrived % Staging::kCopies]);
        if (code == cudaErrorNotReady) {
          (void)cudaGetLastError();
          break;
        }
        if (code != cudaSuccess) return code;
        freed_.store(ends[arrived++ % Staging::kCopies], std::memory_order_release);
      }
      const uint64_t round = (sent / ring_ + 1) * ring_;
      const uint64_t until = std::min({sent + most, round, slices_});
      while (ready < until && filled_[ready].load(std::memory_order_acquire)) ready++;
      const bool idle = copies - arrived < 2;
      const bool enough = ready == until || (idle && ready - sent >= least);
      const bool old = sent < cached_ || next_.load() >= std::min(ready + lag, slices_);
      if (copies - arrived < Staging::kCopies && enough && old) {
        const uint64_t at = sent * slice_;
        const uint64_t bytes = std::min(ready * slice_, bytes_) - at;
        const uint8_t* from = with_.memory + sent % ring_ * slice_;
        const cudaEvent_t event = with_.sent[copies % Staging::kCopies];
        cudaError_t code = cudaMemcpyAsync(block_ + at, from, bytes, cudaMemcpyHostToDevice, with_.stream);
        if (code == cudaSuccess) code = cudaEventRecord(event, with_.stream);
        if (code != cudaSuccess) return code;
        ends[copies++ % Staging::kCopies] = sent = ready;
        least = std::min(2 * least, with_.sizes.least / slice_);
      } else if (helpers >= kMany && helped_.load()) {
        pause();
      } else if (!fill_next()) {
        std::this_thread::yield();
      }
    }
    return cudaSuccess;
  }

  // Fills the next slice, if there is one and its place is free.
  bool fill_next() noexcept {
    uint64_t slice = next_.load();
    do {
      if (slice >= slices_ || slice >= freed_.load(std::memory_order_acquire) + ring_) return false;
    } while (!next_.compare_exchange_weak(slice, slice + 1));
    const uint64_t start = slice * slice_, end = std::min(start + slice_, bytes_);
    if (limit_) {
      const std::chrono::duration<double> due(static_cast<double>(start) / static_cast<double>(limit_));
      std::this_thread::sleep_until(begin_ + std::chrono::duration_cast<std::chrono::steady_clock::duration>(due));
    }
    uint8_t* to = with_.memory + slice % ring_ * slice_;
    const Piece* piece = std::upper_bound(
        pieces_, pieces_ + n_, start, [](uint64_t at, const Piece& p) { return at < p.to + p.bytes; });
    for (; piece != pieces_ + n_ && piece->to < end; ++piece) {
      const uint64_t from = std::max(start, piece->to), until = std::min(end, piece->to + piece->bytes);
      const Copy around = slice < cached_ ? with_.around : nullptr;
      if (!read(to + (from - start), piece->from + (from - piece->to), until - from, around)) return false;
    }
    filled_[slice].store(1, std::memory_order_release);
    return true;
  }

  // Reads a part of the file, by way of memory that stays in this core's cache if it is to go around the caches.
  bool read(uint8_t* to, uint64_t from, uint64_t bytes, Copy around) noexcept {
    alignas(64) uint8_t own[64 << 10];
    while (bytes != 0) {
      const uint64_t most = around ? std::min<uint64_t>(bytes, sizeof(own)) : bytes;
      const ssize_t got = pread(file_, around ? own : to, most, static_cast<off_t>(from));
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) {
        failed_.store(got < 0 ? errno : ENODATA);
        stop_.store(true);
        return false;
      }
      const auto length = static_cast<uint64_t>(got);
      if (around) around(to, own, length);
      to += length, from += length, bytes -= length;
    }
    return true;
  }

  Staging& with_;
  uint8_t* const block_;
  const uint64_t bytes_;
  const int file_;
  const Piece* const pieces_;
  const size_t n_;
  const uint64_t limit_;
  const uint64_t slice_;
  const uint64_t slices_;
  const uint64_t ring_;
  const uint64_t cached_;  // the first slice that goes through the caches and is sent late
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  std::vector<std::atomic<uint8_t>> filled_;
  std::atomic<bool> helped_{false};
  std::atomic<bool> stop_{false};
  std::atomic<int> failed_{0};  // why a thread could not read
  // What everybody writes, and what the sender writes, on cache lines of their own.
  alignas(64) std::atomic<uint64_t> next_{0};
  alignas(64) std::atomic<uint64_t> freed_{0};
};

// Copies `pieces` of a file, which are sorted and do not overlap, into a block on the current device; done when it returns.
// What `after` has until now is done before the first byte arrives. `threads` help; with a `limit` in bytes a second nobody
// does.
inline Outcome upload(
    Staging& with, cudaStream_t after, uint8_t* block, uint64_t bytes, int file, const Piece* pieces, size_t n,
    size_t threads, uint64_t limit) {
  std::lock_guard<std::mutex> lock(with.busy);
  cudaError_t code = with.prepare(threads);
  if (code == cudaSuccess) code = cudaEventRecord(with.sent[0], after);
  if (code == cudaSuccess) code = cudaStreamWaitEvent(with.stream, with.sent[0], 0);
  if (code != cudaSuccess) return {code, 0};
  return Upload(with, block, bytes, file, pieces, n, limit).run(limit ? 0 : threads);
}

}  // namespace uploads

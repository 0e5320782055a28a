// Pieces of a file into a block of device memory, through a ring of pinned buffers.
//
// A few threads read the file into the buffers, one buffer each at a time. The calling thread sends full buffers to the
// device in order, on one stream, and is the only thread that calls CUDA: its calls get slower when several threads
// make them. The file is read, not mapped: page faults of a map make copying half as slow again
// (benches/results/load-h200.json). The pinned memory is kept, because pinning it takes longer than filling it.
//
// Nothing here needs more than the CUDA runtime, so that the sanitizers can run it without a device.
#pragma once

#include <cuda_runtime_api.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdint>
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

// The end of an upload: an error of CUDA's, an error of reading the file as errno has it, or none.
struct Outcome {
  cudaError_t cuda = cudaSuccess;
  int file = 0;
};

// The buffers of uploads to one device, one at a time. They are never destroyed: the process may end in an upload.
struct Staging {
  static constexpr size_t kBuffers = 16;

  std::mutex busy;
  uint64_t buffer = 2 << 20;  // bytes of each
  uint8_t* memory = nullptr;
  cudaStream_t stream = nullptr;
  cudaEvent_t sent[kBuffers] = {};

  cudaError_t prepare() noexcept {
    cudaError_t code = cudaSuccess;
    if (!stream) code = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    for (auto& event : sent)
      if (code == cudaSuccess && !event) code = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    if (code == cudaSuccess && !memory) {
      void* made = nullptr;
      code = cudaHostAlloc(&made, kBuffers * buffer, cudaHostAllocPortable);
      if (code == cudaSuccess) memory = static_cast<uint8_t*>(made);
    }
    return code;
  }
};

// One upload. Slice i of the block, as long as a buffer, passes through buffer i % kBuffers.
class Upload {
 public:
  Upload(Staging& with, uint8_t* block, uint64_t bytes, int file, const Piece* pieces, size_t n, uint64_t limit)
      : with_(with), block_(block), bytes_(bytes), file_(file), pieces_(pieces), n_(n), limit_(limit),
        slices_((bytes + with.buffer - 1) / with.buffer), full_(slices_, false) {}

  Outcome run(size_t threads) noexcept {
    // A slice is sent when it is full, so more threads than buffers would wait for each other.
    threads = std::min<uint64_t>({std::max<size_t>(threads, 1), kThreads, slices_});
    std::vector<std::thread> readers;
    const cudaError_t sent = send(readers, threads);
    stop();
    for (auto& reader : readers) reader.join();
    // Also after a failure: the copies must have left the buffers.
    const cudaError_t arrived = cudaStreamSynchronize(with_.stream);
    return {sent == cudaSuccess ? arrived : sent, failed_};
  }

 private:
  static constexpr uint64_t kThreads = 8;
  static constexpr uint64_t kLag = 4;  // slices that are read after one before it is sent
  static constexpr uint64_t kInFlight = Staging::kBuffers / 2;  // copies that the device has to do

  cudaError_t send(std::vector<std::thread>& readers, size_t threads) noexcept {
    try {
      while (readers.size() < threads) readers.emplace_back([this] { read_slices(); });
    } catch (const std::system_error&) {
      // The readers that were started will do; without any, there is no thread to be had.
      if (readers.empty()) failed_ = EAGAIN;
    }
    for (uint64_t slice = 0; slice < slices_; slice++) {
      {
        std::unique_lock<std::mutex> lock(mutex_);
        // Sent some MiB later, bytes have left the cache of the core that read them: from there they come at half the
        // speed.
        const uint64_t later = std::min(slice + kLag + 1, slices_);
        changed_.wait(lock, [&] { return (full_[slice] && next_ >= later) || failed_; });
        if (failed_) return cudaSuccess;
      }
      const uint64_t at = slice * with_.buffer, buffer = slice % Staging::kBuffers;
      const uint64_t bytes = std::min(with_.buffer, bytes_ - at);
      cudaError_t code = cudaMemcpyAsync(
          block_ + at, with_.memory + buffer * with_.buffer, bytes, cudaMemcpyHostToDevice, with_.stream);
      if (code == cudaSuccess) code = cudaEventRecord(with_.sent[buffer], with_.stream);
      if (code == cudaSuccess && slice >= kInFlight)
        code = cudaEventSynchronize(with_.sent[(slice - kInFlight) % Staging::kBuffers]);
      // After a failure the device may still copy from every buffer: none is given back.
      if (code != cudaSuccess) return code;
      if (slice >= kInFlight) {
        std::lock_guard<std::mutex> lock(mutex_);
        end_ = slice - kInFlight + 1 + Staging::kBuffers;
        changed_.notify_all();
      }
    }
    return cudaSuccess;
  }

  void read_slices() noexcept {
    // Signals are for the program's own threads.
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, nullptr);
    for (;;) {
      uint64_t slice;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return stopped_ || failed_ || next_ == slices_ || next_ < end_; });
        if (stopped_ || failed_ || next_ == slices_) return;
        slice = next_++;
      }
      const int failed = read_slice(slice);
      std::lock_guard<std::mutex> lock(mutex_);
      if (failed) failed_ = failed;
      full_[slice] = true;
      changed_.notify_all();
    }
  }

  // Returns 0, or why the file could not be read.
  int read_slice(uint64_t slice) noexcept {
    const uint64_t start = slice * with_.buffer, end = std::min(start + with_.buffer, bytes_);
    if (limit_) {
      const std::chrono::duration<double> due(static_cast<double>(end) / static_cast<double>(limit_));
      std::this_thread::sleep_until(begin_ + std::chrono::duration_cast<std::chrono::steady_clock::duration>(due));
    }
    uint8_t* buffer = with_.memory + slice % Staging::kBuffers * with_.buffer;
    const Piece* piece = std::upper_bound(
        pieces_, pieces_ + n_, start, [](uint64_t at, const Piece& p) { return at < p.to + p.bytes; });
    for (; piece != pieces_ + n_ && piece->to < end; ++piece) {
      const uint64_t from = std::max(start, piece->to), until = std::min(end, piece->to + piece->bytes);
      if (const int failed = read(buffer + (from - start), piece->from + (from - piece->to), until - from))
        return failed;
    }
    return 0;
  }

  int read(uint8_t* to, uint64_t from, uint64_t bytes) noexcept {
    while (bytes != 0) {
      const ssize_t got = pread(file_, to, bytes, static_cast<off_t>(from));
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) return got < 0 ? errno : ENODATA;
      to += got, from += static_cast<uint64_t>(got), bytes -= static_cast<uint64_t>(got);
    }
    return 0;
  }

  void stop() noexcept {
    std::lock_guard<std::mutex> lock(mutex_);
    stopped_ = true;
    changed_.notify_all();
  }

  Staging& with_;
  uint8_t* const block_;
  const uint64_t bytes_;
  const int file_;
  const Piece* const pieces_;
  const size_t n_;
  const uint64_t limit_;
  const uint64_t slices_;
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  std::mutex mutex_;
  std::condition_variable changed_;
  // The mutex guards the following fields.
  std::vector<bool> full_;
  uint64_t next_ = 0;                   // the next slice to read
  uint64_t end_ = Staging::kBuffers;    // slices before it have a buffer
  bool stopped_ = false;
  int failed_ = 0;  // why a thread could not read
};

// Copies `pieces` of a file, which are sorted and do not overlap, into a block on the current device; done when it
// returns. The present work of `after` is done before the first byte arrives. Up to `threads` threads read. `limit` is
// in bytes a second.
inline Outcome upload(
    Staging& with, cudaStream_t after, uint8_t* block, uint64_t bytes, int file, const Piece* pieces, size_t n,
    size_t threads, uint64_t limit) {
  std::lock_guard<std::mutex> lock(with.busy);
  cudaError_t code = with.prepare();
  if (code == cudaSuccess) code = cudaEventRecord(with.sent[0], after);
  if (code == cudaSuccess) code = cudaStreamWaitEvent(with.stream, with.sent[0], 0);
  if (code != cudaSuccess) return {code, 0};
  return Upload(with, block, bytes, file, pieces, n, limit).run(limit ? 1 : threads);
}

}  // namespace uploads

// Uploads to a device that is a thread (cudart/cuda_runtime_api.h), for the sanitizers: pieces of odd lengths at odd
// places, through rings that go round many times, with calls of CUDA that fail and files that end too early.
//
//   uploads all|early|overflow ROUNDS       `early` and `overflow` are controls: a device that says too early that it has
//                                           copied, and a block that is shorter than the copy into it

#include "must.h"
#include "upload.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>

#include <sys/mman.h>
#include <unistd.h>

namespace {

std::atomic<uint64_t> calls{0}, failures{0}, endings{0};

using Random = std::mt19937_64;

uint64_t below(Random& random, uint64_t end) { return random() % end; }

// A file of these bytes.
class File {
 public:
  explicit File(const std::vector<uint8_t>& bytes) : file(memfd_create("upload", MFD_CLOEXEC)) {
    MUST(file >= 0);
    for (size_t at = 0; at < bytes.size();) {
      const ssize_t done = write(file, bytes.data() + at, bytes.size() - at);
      MUST(done > 0);
      at += static_cast<size_t>(done);
    }
  }
  ~File() { close(file); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  const int file;
};

// Kept, as in the shim.
uploads::Staging& staging(uint64_t buffer) {
  auto* made = new uploads::Staging;
  if (buffer) made->buffer = buffer;
  static auto* all = new std::vector<uploads::Staging*>;
  static std::mutex lock;
  std::lock_guard<std::mutex> held(lock);
  all->push_back(made);
  return *made;
}

// Uploads up to `most` bytes in pieces, and looks at every byte that arrived.
void once(uploads::Staging& with, Random& random, uint64_t most, bool may_fail) {
  const uint64_t bytes = below(random, most);
  const uint64_t longest = below(random, 2) ? most : 3000;
  std::vector<uploads::Piece> pieces;
  std::vector<uint8_t> source;
  for (uint64_t at = below(random, 100); at < bytes;) {
    const uint64_t length = std::min(bytes - at, below(random, longest));
    // Between the pieces there is something else in the file, too.
    const uint64_t from = source.size() + (length ? below(random, 70) : 0);
    source.resize(from + length);
    for (uint64_t i = 0; i < length; i += sizeof(uint64_t)) {
      const uint64_t word = random();
      std::memcpy(source.data() + from + i, &word, std::min<uint64_t>(sizeof(word), length - i));
    }
    pieces.push_back({at, from, length});
    at += length + (below(random, 2) ? 0 : below(random, 300));
  }
  const File file(source);
  const bool ends = may_fail && !source.empty() && below(random, 8) == 0;
  if (ends) MUST(ftruncate(file.file, static_cast<off_t>(below(random, source.size()))) == 0);
  std::vector<uint8_t> block(bytes);
  const uint64_t limit = below(random, 16) == 0 ? 1 << 26 : 0;
  const bool fails = may_fail && !ends && below(random, 4) == 0;
  // Half of them in the first wait for a copy: two calls for `after`, two for each of nine slices, then the wait.
  if (fails) fake::fails = static_cast<int64_t>(below(random, 2) ? 2 + 9 * 2 : below(random, 60));
  const uploads::Outcome outcome = uploads::upload(
      with, nullptr, block.data(), bytes, file.file, pieces.data(), pieces.size(), below(random, 12), limit);
  const bool reached = fails && fake::fails < 0;
  fake::fails = -1;
  calls += 1;
  MUST((outcome.cuda != cudaSuccess) == reached);
  MUST(outcome.file == (ends ? ENODATA : 0));
  if (ends) endings += 1;
  if (reached) failures += 1;
  if (ends || reached) return;
  for (const auto& piece : pieces)
    MUST(piece.bytes == 0 || std::memcmp(block.data() + piece.to, source.data() + piece.from, piece.bytes) == 0);
}

}  // namespace

int main(int argc, char** argv) {
  MUST(argc == 3);
  const std::string what = argv[1];
  const uint64_t rounds = std::strtoull(argv[2], nullptr, 10);
  Random random(20261121);
  if (what == "early" || what == "overflow") {
    fake::early = what == "early";
    auto& with = staging(4 << 10);
    const File file(std::vector<uint8_t>(200'001));
    for (uint64_t i = 0; i < rounds; i++) {
      std::vector<uint8_t> block(200'001 - (what == "overflow"));
      const uploads::Piece piece{0, 0, 200'001};
      uploads::upload(with, nullptr, block.data(), 200'001, file.file, &piece, 1, 3, 0);
    }
    return 0;
  }
  std::vector<std::thread> threads;
  auto& shared = staging(4 << 10);
  for (int t = 0; t < 3; t++)
    threads.emplace_back([&, t] {
      Random own(static_cast<uint64_t>(t));
      auto& large = staging(16 << 10);
      auto& odd = staging(5003);
      for (uint64_t i = 0; i < rounds; i++) {
        once(large, own, 600'000, true);
        once(odd, own, 600'000, true);
        once(shared, own, 100'000, true);
      }
    });
  for (auto& thread : threads) thread.join();
  // The size that is used.
  auto& real = staging(0);
  for (uint64_t i = 0; i < 4; i++) once(real, random, 130'000'000, false);
  MUST(failures > 0 && endings > 0);
  std::printf("calls: %llu\n", static_cast<unsigned long long>(calls.load()));
  return 0;
}

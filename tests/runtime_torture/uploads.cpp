// Uploads to a device that is a thread (cudart/cuda_runtime_api.h), for the sanitizers: pieces of odd lengths at odd places,
// through rings that go round many times, with calls of CUDA that fail.
//
//   uploads all|early|overflow ROUNDS       `early` and `overflow` are controls: a device that says too early that it has
//                                           copied, and a piece that ends after its memory

#include "must.h"
#include "upload.h"

#include <cstdio>
#include <random>
#include <string>

namespace {

std::atomic<uint64_t> calls{0}, failures{0};

using Random = std::mt19937_64;

uint64_t below(Random& random, uint64_t end) { return random() % end; }

// Kept, as in the shim: threads sleep in it.
uploads::Staging& staging(uploads::Copy copy, bool small) {
  auto* made = new uploads::Staging;
  if (small) made->sizes = {64 << 10, 4 << 10, 16 << 10, 8 << 10};
  made->copy = copy;
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
  std::vector<std::vector<uint8_t>> sources;
  for (uint64_t at = below(random, 100); at < bytes;) {
    const uint64_t length = std::min(bytes - at, below(random, longest));
    const uint64_t odd = below(random, 70);
    std::vector<uint8_t> source(odd + length);
    for (size_t i = 0; i < source.size(); i++) source[i] = static_cast<uint8_t>(random() >> 7);
    pieces.push_back({at, source.data() + odd, length});
    sources.push_back(std::move(source));
    at += length + (below(random, 2) ? 0 : below(random, 300));
  }
  std::vector<uint8_t> block(bytes);
  const uint64_t limit = below(random, 16) == 0 ? 1 << 26 : 0;
  const bool fails = may_fail && below(random, 4) == 0;
  if (fails) fake::fails = static_cast<int64_t>(below(random, 60));
  const cudaError_t code = uploads::upload(
      with, nullptr, block.data(), bytes, pieces.data(), pieces.size(), below(random, 12), limit);
  const bool reached = fails && fake::fails < 0;
  fake::fails = -1;
  calls += 1;
  MUST((code != cudaSuccess) == reached);
  if (reached) {
    failures += 1;
    return;
  }
  for (const auto& piece : pieces) MUST(std::memcmp(block.data() + piece.to, piece.from, piece.bytes) == 0);
}

}  // namespace

int main(int argc, char** argv) {
  MUST(argc == 3);
  const std::string what = argv[1];
  const uint64_t rounds = std::strtoull(argv[2], nullptr, 10);
  Random random(20261121);
  if (what == "early" || what == "overflow") {
    fake::early = what == "early";
    auto& with = staging(uploads::copy_plain, true);
    for (uint64_t i = 0; i < rounds; i++) {
      std::vector<uint8_t> from(200'001 - (what == "overflow")), block(200'001);
      const uploads::Piece piece{0, from.data(), 200'001};
      uploads::upload(with, nullptr, block.data(), block.size(), &piece, 1, 3, 0);
    }
    return 0;
  }
  std::vector<std::thread> threads;
  auto& shared = staging(uploads::best_copy(), true);
  for (int t = 0; t < 3; t++)
    threads.emplace_back([&, t] {
      Random own(static_cast<uint64_t>(t));
      fake::no_register = t == 1;
      auto& plain = staging(uploads::copy_plain, true);
      auto& best = staging(uploads::best_copy(), true);
      for (uint64_t i = 0; i < rounds; i++) {
        once(plain, own, 600'000, true);
        once(best, own, 600'000, true);
        once(shared, own, 100'000, true);
      }
    });
  for (auto& thread : threads) thread.join();
  // The sizes that are used.
  auto& real = staging(uploads::best_copy(), false);
  for (uint64_t i = 0; i < 4; i++) once(real, random, 80'000'000, false);
  MUST(failures > 0);
  std::printf("calls: %llu\n", static_cast<unsigned long long>(calls.load()));
  return 0;
}

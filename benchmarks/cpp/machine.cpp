// What the machine gives without a kernel, kept up over seconds; csrc/algos/core/machine.h has the best of some milliseconds.
#include "machine.h"

#include <benchmark/benchmark.h>
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <set>
#include <string>

#include "../../csrc/algos/core/checked.h"
#include "../../csrc/algos/core/level.h"
#include "../../csrc/algos/core/parallel.h"

#if defined(__x86_64__)
#define AI3_BEST_LEVEL [[gnu::target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")]]
#else
#define AI3_BEST_LEVEL
#endif

namespace ai3::bench {
namespace {

typedef float Wide __attribute__((vector_size(64)));
constexpr int kLanes = sizeof(Wide) / sizeof(float), kChains = 12;
constexpr int64_t kAhead = 4096, kMoved = 256 << 20;  // bytes: prefetched; of a thread in one team, at least

// Multiply-adds in registers, nothing else; with AVX-512.
AI3_BEST_LEVEL void multiply_add(int64_t steps) {
  Wide chain[kChains];
  for (int c = 0; c < kChains; c++) chain[c] = Wide{} + static_cast<float>(c + 2);
  for (int64_t i = 0; i < steps; i++) {
#pragma GCC unroll 12
    for (int c = 0; c < kChains; c++) chain[c] = chain[c] * .999999f + 1e-6f;
  }
  for (const Wide& c : chain) benchmark::DoNotOptimize(c);
}
AI3_BEST_LEVEL void read(const char* data, int64_t bytes) {
  Wide sum[4] = {};
  for (const char* end = data + bytes; data < end; data += sizeof(sum)) {
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
      const Wide* from = reinterpret_cast<const Wide*>(data) + c;
      __builtin_prefetch(reinterpret_cast<const char*>(from) + kAhead);
      sum[c] += *from;
    }
  }
  for (const Wide& s : sum) benchmark::DoNotOptimize(s);
}
// One line is written for each `lines` that are read, their sum.
AI3_BEST_LEVEL void reduce(const char* from, char* to, int64_t bytes, int64_t lines) {
  const Wide* in = reinterpret_cast<const Wide*>(from);
  Wide* out = reinterpret_cast<Wide*>(to);
  for (const Wide* end = in + bytes / static_cast<int64_t>(sizeof(Wide)); in < end; in += lines) {
    Wide sum = in[0];
    for (int64_t i = 1; i < lines; i++) sum += in[i];
    *out++ = sum;
  }
}

struct Free {
  void operator()(char* p) const { std::free(p); }
};
// Zeros, in huge pages, of which each thread has touched what it is going to use.
std::unique_ptr<char, Free> memory(int threads, int64_t bytes) {
  const auto page = size_t{2} << 20, size = (static_cast<size_t>(bytes) / page + 2) * page;
  char* data = static_cast<char*>(std::aligned_alloc(page, size));
  if (!data) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
  madvise(data, size, MADV_HUGEPAGE);
#endif
  parallel_for(threads, threads, [&](int64_t i, int) {
    const Share mine = share(bytes / 64, threads, i);
    std::memset(data + mine.begin * 64, 0, static_cast<size_t>(mine.end - mine.begin) * 64);
  });
  return std::unique_ptr<char, Free>(data);
}

using benchmark::Counter;
using benchmark::State;

void time_multiply_add(State& state, int threads) {
  constexpr int64_t kSteps = 1 << 19;  // a millisecond
  for (auto _ : state) parallel_for(threads, threads, [&](int64_t, int) { multiply_add(kSteps); });
  state.counters["FLOPS"] = Counter(2. * kChains * kLanes * kSteps * threads, Counter::kIsIterationInvariantRate);
}
// The same bytes over and over, often enough that starting a team does not count: every thread all of them, or its own part.
void time_read(State& state, int threads, int64_t bytes, bool all) {
  const auto data = memory(threads, bytes);
  const int64_t times = ceil_div(kMoved, bytes) * (all ? 1 : threads);
  for (auto _ : state)
    parallel_for(threads, threads, [&](int64_t i, int) {
      const Share mine = all ? Share{0, bytes / 256} : share(bytes / 256, threads, i);
      for (int64_t t = 0; t < times; t++) read(data.get() + mine.begin * 256, (mine.end - mine.begin) * 256);
    });
  state.counters["bytes"] = Counter(static_cast<double>(times * bytes * (all ? threads : 1)), Counter::kIsIterationInvariantRate);
}
// Read and written by plain loads and stores.
void time_reduce(State& state, int threads, int64_t bytes, int64_t lines) {
  const auto from = memory(threads, bytes), to = memory(threads, bytes / lines);
  const int64_t times = ceil_div(kMoved, bytes) * threads;
  for (auto _ : state)
    parallel_for(threads, threads, [&](int64_t i, int) {
      const Share mine = share(bytes / lines / 64, threads, i);
      for (int64_t t = 0; t < times; t++) {
        reduce(from.get() + mine.begin * lines * 64, to.get() + mine.begin * 64, (mine.end - mine.begin) * lines * 64, lines);
        benchmark::ClobberMemory();
      }
    });
  state.counters["bytes"] = Counter(static_cast<double>(times * (bytes + bytes / lines)), Counter::kIsIterationInvariantRate);
}

}  // namespace

void add_machine(int most_threads) {
  auto add = [](const std::string& name, int threads, auto&& body) {
    benchmark::RegisterBenchmark(("machine/" + name + "/threads:" + std::to_string(threads)).c_str(), body)->UseRealTime();
  };
  for (int threads : std::set<int>{1, most_threads}) {
    if (level() == "avx512") add("multiply_add", threads, [=](State& s) { time_multiply_add(s, threads); });
    for (int64_t mib : {1, 4, 9, 18, 36, 144}) {
      const std::string size = std::to_string(mib) + "MiB";
      add("read/" + size + "/parts", threads, [=](State& s) { time_read(s, threads, mib << 20, false); });
      if (threads > 1) add("read/" + size + "/all", threads, [=](State& s) { time_read(s, threads, mib << 20, true); });
      for (int64_t lines : {1, 4})
        add("reduce/" + size + "/" + std::to_string(lines) + "to1", threads,
            [=](State& s) { time_reduce(s, threads, mib << 20, lines); });
    }
  }
}

}  // namespace ai3::bench

#include "machine.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "parallel.h"
#include "simd.h"

namespace ai3::inline AI3_LEVEL {
namespace {

constexpr int kThreadsAtMost = 1024, kChains = 12;

// What is read: beyond the last-level cache of a few cores. Where it is flushed before, no cache has it, and it only
// has to take much longer than threads take to start.
int64_t bytes_to_read([[maybe_unused]] int threads) {
  int64_t mebibytes = 96;
#if defined(__x86_64__)
  if (threads < 12) mebibytes = threads < 3 ? 24 : 8 * threads;
#endif
  return mebibytes << 20;
}

double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// Independent chains of multiply-adds in registers: more of them than latency times units. The best of a few rounds, since other
// work on the machine can only slow one down.
double measure_flops(int threads) {
  constexpr int64_t kSteps = 1 << 17;
  double best = 0;
  for (int round = 0; round < 24; round++) {
    float sinks[kThreadsAtMost];
    const double start = now();
    parallel_for(threads, threads, [&](int64_t i, int) {
      Vec<float> chain[kChains];
      for (int c = 0; c < kChains; c++) chain[c] = Vec<float>(static_cast<float>(i + c + 2));  // equal ones, and 1, are folded
      const Vec<float> factor(0.999999f), term(1e-6f);
      for (int64_t step = 0; step < kSteps; step++) {
#pragma GCC unroll 12
        for (int c = 0; c < kChains; c++) chain[c] = fma(chain[c], factor, term);
      }
      Vec<float> sum = chain[0];
      for (int c = 1; c < kChains; c++) sum += chain[c];
      sinks[i] = sum[0];
    });
    const double flops = 2.0 * kSteps * kChains * Vec<float>::width * threads / (now() - start);
    if (flops > best && sinks[0] == sinks[0]) best = flops;
  }
  return best;
}

// Flushes what is read next: cores with a last-level cache each have room for most of it in all of them together. Where there is
// no such instruction, its size must do.
void leave_caches([[maybe_unused]] const float* data, [[maybe_unused]] int64_t count) {
#if defined(__x86_64__)
  for (int64_t i = 0; i < count; i += 64 / static_cast<int64_t>(sizeof(float))) __builtin_ia32_clflush(data + i);
#endif
}

double measure_bytes(int threads) {
  const int64_t bytes = bytes_to_read(threads);
  auto* data = static_cast<float*>(aligned_alloc(size_t{2} << 20, bytes));
  if (!data) return 1e10;
#ifdef MADV_HUGEPAGE
  madvise(data, bytes, MADV_HUGEPAGE);  // the first touch of small pages takes longer than all that is measured
#endif
  const int64_t count = bytes / static_cast<int64_t>(sizeof(float));
  parallel_ranges(threads, count, 1 << 16, [&](int64_t begin, int64_t end, int) {
    memset(data + begin, 0, static_cast<size_t>(end - begin) * sizeof(float));
  });
  double best = 0;
  for (int round = 0; round < 8; round++) {
    parallel_ranges(threads, count, 1 << 16, [&](int64_t begin, int64_t end, int) { leave_caches(data + begin, end - begin); });
    float sinks[kThreadsAtMost] = {};
    const double start = now();
    parallel_ranges(threads, count, 1 << 16, [&](int64_t begin, int64_t end, int thread) {
      constexpr int kWidth = Vec<float>::width;
      Vec<float> sum[4] = {Vec<float>(0.f), Vec<float>(0.f), Vec<float>(0.f), Vec<float>(0.f)};
      for (int64_t i = begin; i + 4 * kWidth <= end; i += 4 * kWidth)
        for (int c = 0; c < 4; c++) sum[c] += load(data + i + c * kWidth);
      sinks[thread] += ((sum[0] + sum[1]) + (sum[2] + sum[3]))[0];
    });
    const double rate = static_cast<double>(bytes) / (now() - start);
    if (rate > best && sinks[0] == 0) best = rate;
  }
  free(data);
  return best;
}

pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
Machine measured[kThreadsAtMost + 1];

}  // namespace

Machine machine(int threads, bool again) {
  threads = threads < 1 ? 1 : threads > kThreadsAtMost ? kThreadsAtMost : threads;
  pthread_mutex_lock(&mutex);
  Machine fresh{};
  Machine& m = again ? fresh : measured[threads];
  if (m.flops == 0) m = {measure_flops(threads), measure_bytes(threads)};
  const Machine result = m;
  pthread_mutex_unlock(&mutex);
  return result;
}

namespace {
[[gnu::section("ai3_probes"), gnu::used]] constinit const MachineProbe probe = {AI3_STRINGIZE(AI3_LEVEL), machine};
}

}  // namespace ai3::inline AI3_LEVEL

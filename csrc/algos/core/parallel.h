// The one threading seam: an OpenMP team of the size that the problem allows. LibTorch brings the process's only OpenMP runtime.
#pragma once
#include <cstdint>
#ifdef __SANITIZE_THREAD__
#include <thread>
#include <vector>
#elif defined(_OPENMP)
#include <omp.h>
#endif

#include "dtype.h"
#include "isa.h"

namespace ai3::inline AI3_LEVEL {

// body(i, thread) for every i in [0, count), in any order; `thread` in [0, threads) indexes per-thread workspace. Must not throw.
template <class Body>
AI3_INLINE void parallel_for(int threads, int64_t count, const Body& body) {
#if defined(_OPENMP) || defined(__SANITIZE_THREAD__)
  if (threads > 1 && count > 1) {
    const int team = static_cast<int64_t>(threads) < count ? threads : static_cast<int>(count);
#ifdef __SANITIZE_THREAD__  // it does not see how libgomp's threads wait for each other; shares are fixed, so that none goes idle
    std::vector<std::jthread> workers;
    for (int thread = 0; thread < team; thread++)
      workers.emplace_back([&, thread] {
        for (int64_t i = thread; i < count; i += team) body(i, thread);
      });
#else
    // First the share of its own number, the same in every call, of which the thread's cache may still hold something; then what
    // is left, one after the other.
    int64_t taken = 0;
#pragma omp parallel num_threads(team)
    {
      const int thread = omp_get_thread_num(), present = omp_get_num_threads();
      for (int64_t i = thread; i < count; i = present + __atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED)) body(i, thread);
    }
#endif
    return;
  }
#endif
  for (int64_t i = 0; i < count; i++) body(i, 0);
}

// body(begin, end, thread) on one contiguous share of [0, count) for each thread; no share is smaller than `grain` but the last.
template <class Body>
AI3_INLINE void parallel_ranges(int threads, int64_t count, int64_t grain, const Body& body) {
  const int64_t most = count / (grain > 0 ? grain : 1), shares = most < 1 ? 1 : most < threads ? most : threads;
  parallel_for(static_cast<int>(shares), shares, [&](int64_t i, int thread) {
    const int64_t step = count / shares, rest = count % shares;
    const int64_t begin = i * step + (i < rest ? i : rest);
    body(begin, begin + step + (i < rest), thread);
  });
}

}  // namespace ai3::inline AI3_LEVEL

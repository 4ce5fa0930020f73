// The one threading seam: an OpenMP team of the size that the problem allows. LibTorch brings the process's only OpenMP runtime.
#pragma once
#include <cstdint>
#ifdef __SANITIZE_THREAD__
#include <latch>
#include <thread>
#include <vector>
#elif defined(_OPENMP)
#include <omp.h>
#endif

#include "dtype.h"
#include "isa.h"

namespace ai3::inline AI3_LEVEL {

// Part `i` of [0, count) in `parts` shares whose sizes differ by one at most.
struct Share {
  int64_t begin, end;
  AI3_INLINE int64_t size() const { return end - begin; }
};
AI3_INLINE Share share(int64_t count, int64_t parts, int64_t i) { return {count * i / parts, count * (i + 1) / parts}; }

// How many of a share's items are taken.
struct alignas(64) Taken {
  int64_t count = 1;  // the first one is its owner's
};
inline constexpr int kShares = 64;  // more threads than that share them

// What thread `thread` of `present` does: its own share, then what the others have not begun of theirs.
template <class Body>
AI3_INLINE void take_shares(int thread, int present, int64_t count, Taken* taken, const Body& body) {
  const int shares = present < kShares ? present : kShares;
  for (int s = 0; s < shares; s++) {
    const int of = (thread + s) % shares;
    const Share part = share(count, shares, of);
    int64_t* const next = &taken[of].count;
    auto take = [&] { return part.begin + __atomic_fetch_add(next, 1, __ATOMIC_RELAXED); };
    if (thread == of) body(part.begin, thread);
    if (part.begin + 1 == part.end) continue;
    if (part.begin + __atomic_load_n(next, __ATOMIC_RELAXED) >= part.end) continue;
    for (int64_t i = take(); i < part.end; i = take()) body(i, thread);
  }
}

// How many of the threads take part: as few as are done with `count` equal items no later than all of them.
AI3_INLINE int team_of(int threads, int64_t count) {
  if (threads <= 1 || count <= 1) return 1;
  const int64_t most = (count - 1) / threads + 1;  // items of a thread
  return static_cast<int>((count - 1) / most + 1);
}

#ifdef AI3_RECORD_SPLITS
// At a level for tests nothing is computed; a section says how many items it has for how many threads, and their sizes.
void record_split(int threads, int64_t count, const void* sizes, double (*size)(const void* sizes, int64_t item));
#endif
struct AllAlike {
  AI3_INLINE double operator()(int64_t) const { return 1; }
};

// body(i, thread) for every i in [0, count), in any order; `thread` in [0, threads) indexes per-thread workspace. Must not throw.
// Thread t of a team of n first takes share(count, n, t): the same in every call and, where i counts rows or tiles, in every
// layer, so that what it wrote, and reads or writes next, is in its own core's caches. Who is done takes over from the others.
// size(i), vectors multiplied or about as much work, is only asked for by tests.
template <class Body, class Size = AllAlike>
AI3_INLINE void parallel_for(int threads, int64_t count, [[maybe_unused]] const Body& body,
                             [[maybe_unused]] const Size& size = {}) {
#ifdef AI3_RECORD_SPLITS
  return record_split(threads, count, &size, [](const void* of, int64_t i) { return (*static_cast<const Size*>(of))(i); });
#else
#if defined(_OPENMP) || defined(__SANITIZE_THREAD__)
  if (const int team = team_of(threads, count); team > 1) {
    Taken taken[kShares];
#ifdef __SANITIZE_THREAD__  // it does not see how libgomp's threads wait for each other; these start together, so that none is
                            // idle
    std::latch started(team);
    std::vector<std::jthread> workers;
    for (int thread = 0; thread < team; thread++)
      workers.emplace_back([&, thread] {
        started.arrive_and_wait();
        take_shares(thread, team, count, taken, body);
      });
#else
    // All of the process's threads come, those beyond the team in vain: libgomp ends the threads that a smaller region leaves
    // out, and must start others for the next larger one, ours or PyTorch's.
    const int all = omp_get_max_threads();
#pragma omp parallel num_threads(threads < all ? all : threads)
    {
      const int thread = omp_get_thread_num(), present = omp_get_num_threads();
      if (thread < team) take_shares(thread, present < team ? present : team, count, taken, body);
    }
#endif
    return;
  }
#endif
  for (int64_t i = 0; i < count; i++) body(i, 0);
#endif
}

// body(begin, end, thread) on one contiguous share of [0, count) for each thread; no share is smaller than `grain` but the last.
// `size` is that of one index, as above.
template <class Body>
AI3_INLINE void parallel_ranges(int threads, int64_t count, int64_t grain, const Body& body, double size = 1) {
  const int64_t most = count / (grain > 0 ? grain : 1);
  const int64_t shares = team_of(static_cast<int>(most < 1 ? 1 : most < threads ? most : threads), count);
  const int64_t step = count / shares, rest = count % shares;
  parallel_for(
      threads, shares,
      [&](int64_t i, int thread) {
        const int64_t begin = i * step + (i < rest ? i : rest);
        body(begin, begin + step + (i < rest), thread);
      },
      [&](int64_t i) { return size * static_cast<double>(step + (i < rest)); });
}

}  // namespace ai3::inline AI3_LEVEL

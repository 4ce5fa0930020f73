// The loop of what is computed element by element: y = f(x), read and written once.
#pragma once
#include "elementwise_problem.h"
#include "lanes.h"
#include "streaming.h"

namespace ai3::inline AI3_LEVEL {

// f of each vector. Outputs that no cache holds go past the caches. `grain` elements are worth another thread: f of so many takes
// some microseconds, as waking it does.
template <class T, class F>
AI3_INLINE void map_elements(const ElementwiseProblem& p, const T* x, T* y, int64_t grain, const F& f) {
  using V = Vec<Acc<T>>;
  constexpr int64_t width = V::width, together = 4;  // vectors that are read before one is written: 5 to 15 % in the L2 cache
  constexpr int64_t kLarge = 32 << 20;               // bytes of output
  const Strides4 line{width, 1, width, width};
  auto elements = [&](const T* x, T* y, int64_t i, int64_t end, bool past) {
    for (; i + together * width <= end; i += together * width) {
      V v[together];
#pragma GCC unroll 4
      for (int64_t j = 0; j < together; j++) v[j] = f(load(x + i + j * width));
#pragma GCC unroll 4
      for (int64_t j = 0; j < together; j++) past ? store_streaming(y + i + j * width, v[j]) : store(y + i + j * width, v[j]);
    }
    if (past) finish_streaming();
    for (; i + width <= end; i += width) store(y + i, f(load(x + i)));
    if (i < end) store_partial(y + i, f(load_partial(x + i, end - i)), end - i);
  };
  if (p.row < p.count)
    return parallel_ranges(p.threads, p.count / p.row, ceil_div(grain, p.row), [&](int64_t begin, int64_t end, int) {
      for (int64_t r = begin; r < end; r++) elements(x + r * p.x_row, y + r * p.y_row, 0, p.row, false);
    });
  const bool past = p.count * static_cast<int64_t>(sizeof(T)) >= kLarge && has_whole_lines<T>(line, y);
  parallel_ranges(p.threads, ceil_div(p.count, width), grain / width,
                  [&](int64_t begin, int64_t end, int) { elements(x, y, begin * width, smaller(end * width, p.count), past); });
}

}  // namespace ai3::inline AI3_LEVEL

// A copy: outputs never alias inputs.
#include "problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

template <class T>
void flatten_direct(const ElementwiseProblem& p, const T* x, T* y, Workspace&) {
  if (p.row < p.count)
    return parallel_ranges(p.threads, p.count / p.row, ceil_div(1 << 16, p.row), [&](int64_t begin, int64_t end, int) {
      for (int64_t r = begin; r < end; r++) __builtin_memcpy(y + r * p.y_row, x + r * p.x_row, p.row * sizeof(T));
    });
  parallel_ranges(p.threads, p.count, 1 << 16,
                  [&](int64_t begin, int64_t end, int) { __builtin_memcpy(y + begin, x + begin, (end - begin) * sizeof(T)); });
}

AI3_ALGORITHM(flatten, direct, .sliced = true)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

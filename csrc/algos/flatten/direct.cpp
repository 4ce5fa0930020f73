// A copy: outputs never alias inputs.
#include "../core/algorithm.h"

namespace ai3::inline AI3_LEVEL {
namespace {

template <class T>
void flatten_direct(const ElementwiseProblem& p, const T* x, T* y, Workspace&) {
  parallel_ranges(p.threads, p.count, 1 << 16,
                  [&](int64_t begin, int64_t end, int) { __builtin_memcpy(y + begin, x + begin, (end - begin) * sizeof(T)); });
}

AI3_ALGORITHM(flatten, direct)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

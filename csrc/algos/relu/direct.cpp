// max(x, 0) in one pass at memory speed. NaN stays NaN and -0 stays -0, as in ATen.
#include "../core/algorithm.h"

namespace ai3::inline AI3_LEVEL {
namespace {

template <class T>
void relu_direct(const ElementwiseProblem& p, const T* x, T* y, Workspace&) {
  constexpr int width = Vec<Acc<T>>::width;
  parallel_ranges(p.threads, p.count, 1 << 15, [&](int64_t begin, int64_t end, int) {
    int64_t i = begin;
    for (; i + width <= end; i += width) store(y + i, relu(load(x + i)));
    if (i < end) store_partial(y + i, relu(load_partial(x + i, end - i)), end - i);
  });
}

AI3_ALGORITHM(relu, direct)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

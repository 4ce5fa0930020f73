// max(x, 0) in one pass at memory speed. NaN stays NaN and -0 stays -0, as in ATen.
#include "../core/elementwise.h"
#include "problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

template <class T>
void relu_direct(const ElementwiseProblem& p, const T* x, T* y, Workspace&) {
  map_elements(p, x, y, 1 << 15, [](Vec<Acc<T>> v) { return relu(v); });
}

AI3_ALGORITHM(relu, direct, .sliced = true)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

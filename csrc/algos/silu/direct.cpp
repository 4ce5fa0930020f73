// x / (1 + e^-x) in one pass.
#include "../core/elementwise.h"
#include "../core/epilogue.h"
#include "problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

template <class T>
void silu_direct(const ElementwiseProblem& p, const T* x, T* y, Workspace&) {
  map_elements(p, x, y, 1 << 13, [](Vec<Acc<T>> v) { return activate(Activation::silu, v); });
}

AI3_ALGORITHM(silu, direct, .accuracy = Accuracy::bounded, .error_bound = 1e-6, .sliced = true)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

// x / (1 + e^-x), in one pass.
#include "../../algos/silu/problem.h"
#include "../core/device.cuh"

namespace ai3::inline AI3_LEVEL {
namespace {

template <class T>
void silu_direct(const ElementwiseProblem& p, const T* x, T* y, Workspace& workspace) {
  using A = Acc<T>;
  map_elements(p.count, x, y, workspace, "silu_direct", [] __device__(A v) { return v / (A(1) + exp(-v)); });
}

AI3_ALGORITHM(silu, direct, .accuracy = Accuracy::bounded, .error_bound = 1e-6, .supports = device_supports<ElementwiseProblem>)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

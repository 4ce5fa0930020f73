#include "../../algos/relu/problem.h"
#include "../core/device.cuh"

namespace ai3::inline AI3_LEVEL {
namespace {

template <class T>
void relu_direct(const ElementwiseProblem& p, const T* x, T* y, Workspace& workspace) {
  // NaN stays; -0 becomes 0, as in ATen on a GPU.
  map_elements(p.count, x, y, workspace, "relu_direct", [] __device__(Acc<T> v) { return v <= 0 ? Acc<T>(0) : v; });
}

AI3_ALGORITHM(relu, direct, .supports = device_supports<ElementwiseProblem>)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

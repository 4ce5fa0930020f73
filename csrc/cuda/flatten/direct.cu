#include "../../algos/flatten/problem.h"
#include "../core/device.cuh"

namespace ai3::inline AI3_LEVEL {
namespace {

template <class T>
void flatten_direct(const ElementwiseProblem& p, const T* x, T* y, Workspace& workspace) {
  check_cuda(cudaMemcpyAsync(y, x, static_cast<size_t>(p.count) * sizeof(T), cudaMemcpyDeviceToDevice, stream_of(workspace)),
             "flatten_direct");
}

AI3_ALGORITHM(flatten, direct, .supports = device_supports<ElementwiseProblem>)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

#include "../../algos/relu/problem.h"
#include "../core/device.cuh"

namespace ai3::inline AI3_LEVEL {
namespace {

template <class T>
void relu_direct(const ElementwiseProblem& p, const T* x, T* y, Workspace& workspace) {
  for_each(p.count, workspace, "relu_direct", [=] __device__(int64_t i) {
    const Acc<T> value = load_acc(x + i);
    store_acc(y + i, value < 0 ? Acc<T>(0) : value);  // NaN and -0 stay
  });
}

AI3_ALGORITHM(relu, direct, .supports = device_supports<ElementwiseProblem>)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

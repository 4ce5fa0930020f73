// x times the share of the normal distribution that lies below x, or that share by tanh (Hendrycks & Gimpel 2016), in one pass.
#include "../../algos/gelu/problem.h"
#include "../core/device.cuh"

namespace ai3::inline AI3_LEVEL {
namespace {

template <class T>
void gelu_direct(const ElementwiseProblem& p, const T* x, T* y, Workspace& workspace) {
  using A = Acc<T>;
  const bool by_tanh = p.form == 1;
  map_elements(p.count, x, y, workspace, "gelu_direct", [=] __device__(A v) {
    // erfc, not 1 + erf: of negative v, however small the share is, it keeps its bits.
    const A share = by_tanh ? A(1) / (A(1) + exp(A(-1.5957691216057308) * (v + A(0.044715) * v * v * v)))
                            : A(0.5) * erfc(v * A(-0.70710678118654752));
    return v * share;
  });
}

AI3_ALGORITHM(gelu, direct, .accuracy = Accuracy::bounded, .error_bound = 4e-6, .supports = device_supports<ElementwiseProblem>)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

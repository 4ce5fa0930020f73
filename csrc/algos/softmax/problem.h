// What softmax computes: y[o][j][i] = exp(x[o][j][i]) / (the sum of exp(x[o][k][i]) over k).
#pragma once
#include "../core/algorithm.h"

namespace ai3 {

// x and y are contiguous (outer, size, inner), and y may be x itself. A size of -1 is unknown.
struct SoftmaxProblem {
  using Operands = UnaryOperands;
  using Gradients = UnaryGradients;
  DType dtype;
  int32_t threads;
  int64_t outer, size, inner;
  Parameters parameters = {};
};
AI3_INLINE bool sizes_known(const SoftmaxProblem& p) { return p.outer >= 0 && p.size >= 0 && p.inner >= 0; }
AI3_INLINE auto value_of(const SoftmaxProblem& p) {
  const auto& [dtype, threads, outer, size, inner, parameters] = p;
  return as_numbers(dtype, threads, outer, size, inner, parameters);
}

namespace problem_of {
using softmax = SoftmaxProblem;
}  // namespace problem_of

}  // namespace ai3

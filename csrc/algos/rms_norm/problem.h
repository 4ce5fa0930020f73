// What rms_norm computes: y[r][j] = x[r][j] / sqrt(mean(x[r]^2) + eps) * weight[j].
#pragma once
#include "../core/algorithm.h"

namespace ai3 {

struct RmsNormOperands {
  Operand input = {}, weight = {};
  Operand output = {};
  template <class T, class Body>
  AI3_INLINE void plain(const Body& body) const {
    body(input.read<T>(), weight.read<T>(), output.write<T>());
  }
};

// x and y are contiguous (rows, features). A size of -1 is unknown.
struct RmsNormProblem {
  using Operands = RmsNormOperands;
  using Gradients = WeightedGradients;  // without a bias
  static constexpr bool centered = false;
  DType dtype;
  int32_t threads;
  int64_t rows, features;
  double eps;
  bool has_weight;
  bool wide_weight;  // the weight is float32 beside an input of 16 bits; else it has its dtype
  Parameters parameters = {};
};
AI3_INLINE bool sizes_known(const RmsNormProblem& p) { return p.rows >= 0 && p.features >= 0; }
AI3_INLINE auto value_of(const RmsNormProblem& p) {
  const auto& [dtype, threads, rows, features, eps, weight, wide, parameters] = p;
  return as_numbers(dtype, threads, rows, features, eps, weight, wide, parameters);
}

namespace problem_of {
using rms_norm = RmsNormProblem;
}  // namespace problem_of

}  // namespace ai3

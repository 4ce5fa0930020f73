// What layer_norm computes: y[r][j] = (x[r][j] - mean(x[r])) / sqrt(variance(x[r]) + eps) * weight[j] + bias[j].
#pragma once
#include "../core/algorithm.h"

namespace ai3 {

struct LayerNormOperands {
  Operand input = {}, weight = {}, bias = {};
  Operand output = {};
  template <class T, class Body>
  AI3_INLINE void plain(const Body& body) const {
    body(input.read<T>(), weight.read<T>(), bias.read<T>(), output.write<T>());
  }
};

// x and y are contiguous (rows, features). A size of -1 is unknown.
struct LayerNormProblem {
  using Operands = LayerNormOperands;
  using Gradients = WeightedGradients;
  static constexpr bool centered = true;  // around the mean
  DType dtype;
  int32_t threads;
  int64_t rows, features;
  double eps;
  bool has_weight, has_bias;
  bool wide_weight;  // weight and bias are float32 beside an input of 16 bits; else they have its dtype
  Parameters parameters = {};
};
AI3_INLINE bool sizes_known(const LayerNormProblem& p) { return p.rows >= 0 && p.features >= 0; }
AI3_INLINE auto value_of(const LayerNormProblem& p) {
  const auto& [dtype, threads, rows, features, eps, weight, bias, wide, parameters] = p;
  return as_numbers(dtype, threads, rows, features, eps, weight, bias, wide, parameters);
}

namespace problem_of {
using layer_norm = LayerNormProblem;
}  // namespace problem_of

}  // namespace ai3

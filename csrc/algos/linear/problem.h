// What linear computes: y[m][n] = bias[n] + sum over k of x[m][k] * w[n][k].
#pragma once
#include "../core/algorithm.h"

namespace ai3 {

struct LinearOperands {
  Operand input = {}, weight = {}, bias = {}, residual = {};  // `weight` is the packed form where the algorithm packs
  Operand output = {};
  Operand slope = {};  // of an activation that has one: one of the accumulator's type for each output feature
  template <class T, class Body>
  AI3_INLINE void plain(const Body& body) const {
    body(input.read<T>(), weight.read<T>(), bias.read<T>(), output.write<T>());
  }
};

struct LinearProblem {
  using Operands = LinearOperands;
  using Gradients = WeightedGradients;
  DType dtype;
  int32_t threads;
  int64_t rows, in_features, out_features;
  Activation activation;
  bool has_bias, has_residual, allow_tf32, deterministic;
  const char* exclude;  // as in Conv2dProblem
  // Elements from one row to the next: in_features and out_features or, for `sliced` algorithms, more. The residual has y's, and
  // may be y itself. w is contiguous.
  int64_t x_row, y_row;
  Parameters parameters = {};
};

AI3_INLINE bool sizes_known(const LinearProblem& p) { return (p.rows | p.in_features | p.out_features) >= 0; }
AI3_INLINE auto value_of(const LinearProblem& p) {
  const auto& [dtype, threads, rows, in, out, activation, bias, residual, tf32, deterministic, exclude, x_row, y_row,
               parameters] = p;
  return as_numbers(dtype, threads, rows, in, out, activation, bias, residual, tf32, deterministic, x_row, y_row, parameters);
}
AI3_INLINE auto pack_description(const LinearProblem& p) {
  return as_numbers(p.dtype, p.in_features, p.out_features, p.parameters);
}
AI3_INLINE bool weight_known(const LinearProblem& p) { return (p.in_features | p.out_features) >= 0; }
AI3_INLINE std::array<int64_t, 2> weight_sizes(const LinearProblem& p) { return {p.out_features, p.in_features}; }
AI3_INLINE LinearProblem with_dense_rows(LinearProblem p) {
  p.x_row = p.in_features, p.y_row = p.out_features;
  return p;
}

namespace problem_of {
using linear = LinearProblem;
}  // namespace problem_of

}  // namespace ai3

// What batch_norm computes: y = (x - mean[channel]) / sqrt(variance[channel] + eps) * weight[channel] + bias[channel], with the
// mean and variance that it is given.
#pragma once
#include "../core/algorithm.h"
#include "../core/channels_problem.h"

namespace ai3 {

struct BatchNormOperands {
  Operand input = {}, weight = {}, bias = {}, mean = {}, variance = {};
  Operand output = {};
  template <class T, class Body>
  AI3_INLINE void plain(const Body& body) const {
    body(input.read<T>(), weight.read<T>(), bias.read<T>(), mean.read<T>(), variance.read<T>(), output.write<T>());
  }
};
struct BatchNormGradients {
  Operand grad_output = {}, input = {}, weight = {}, mean = {}, variance = {};
  Operand grad_input = {}, grad_weight = {}, grad_bias = {};
};

struct BatchNormProblem {
  using Operands = BatchNormOperands;
  using Gradients = BatchNormGradients;
  DType dtype;
  int32_t threads;
  Channels of;  // x's and y's
  double eps;
  bool training;  // the mean and variance of the batch: what no algorithm computes, since it changes the given ones
  bool has_weight, has_bias;
  bool wide_weight;  // weight, bias, mean and variance are float32 beside an input of 16 bits; else they have its dtype
  Parameters parameters = {};
};
// Static: records hold its address, and levels must not share one copy.
AI3_INLINE static bool has_statistics(const BatchNormProblem& p, Reason& reason) {
  return !p.training || refuse(reason, "computes with given statistics, and training=True changes running_mean and running_var");
}
AI3_INLINE bool sizes_known(const BatchNormProblem& p) { return sizes_known(p.of); }
AI3_INLINE auto value_of(const BatchNormProblem& p) {
  const auto& [dtype, threads, of, eps, training, weight, bias, wide, parameters] = p;
  return as_numbers(dtype, threads, of.batch, of.channels, of.pixels, of.last, eps, training, weight, bias, wide, parameters);
}

namespace problem_of {
using batch_norm = BatchNormProblem;
}  // namespace problem_of

}  // namespace ai3

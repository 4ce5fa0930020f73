// What group_norm computes: y = (x - mean) / sqrt(variance + eps) * weight[channel] + bias[channel], mean and variance of each
// group of neighbouring channels of each image.
#pragma once
#include "../core/algorithm.h"
#include "../core/channels_problem.h"

namespace ai3 {

struct GroupNormProblem {
  using Operands = ChannelOperands;
  using Gradients = WeightedGradients;
  DType dtype;
  int32_t threads;
  Channels of;  // x's and y's
  int64_t groups;
  double eps;
  bool has_weight, has_bias;
  bool wide_weight;  // weight and bias are float32 beside an input of 16 bits; else they have its dtype
  Parameters parameters = {};
};
AI3_INLINE bool sizes_known(const GroupNormProblem& p) { return sizes_known(p.of); }
AI3_INLINE auto value_of(const GroupNormProblem& p) {
  const auto& [dtype, threads, of, groups, eps, weight, bias, wide, parameters] = p;
  return as_numbers(dtype, threads, of.batch, of.channels, of.pixels, of.last, groups, eps, weight, bias, wide, parameters);
}

namespace problem_of {
using group_norm = GroupNormProblem;
}  // namespace problem_of

}  // namespace ai3

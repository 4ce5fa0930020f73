// What layer_norm computes: y[r][j] = (x[r][j] - mean(x[r])) / sqrt(variance(x[r]) + eps) * weight[j] + bias[j].
#pragma once
#include "../core/algorithm.h"

namespace ai3 {

// x and y are contiguous (rows, features). A size of -1 is unknown, as in Conv2dProblem.
struct LayerNormProblem {
  DType dtype;
  int32_t threads;
  int64_t rows, features;
  double eps;
  bool has_weight, has_bias;
  bool wide_weight;  // weight and bias are float32 beside an input of 16 bits; else they have its dtype
};
AI3_INLINE bool sizes_known(const LayerNormProblem& p) { return p.rows >= 0 && p.features >= 0; }

namespace problem_of {
using layer_norm = LayerNormProblem;
}  // namespace problem_of

}  // namespace ai3

// The arguments of one linear call, for the glue and for the algorithms that call PyTorch's own operators.
#pragma once
#include "tensors.h"

namespace ai3::ops {

struct LinearCall {
  Tensor input, weight;  // the weight is a packed one where weight_size is given
  Sizes weight_size;
  std::optional<Tensor> bias;
  std::optional<Tensor> residual;
  Activation activation = Activation::none;
  bool allow_tf32 = false, deterministic = false;
  std::optional<Tensor> output;  // where to write, when it is given; what an algorithm of PyTorch's operators leaves

  void take_options(Arguments& in) { allow_tf32 = in.take<bool>(), deterministic = in.take<bool>(); }
};

}  // namespace ai3::ops

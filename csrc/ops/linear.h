// The arguments of one linear call, for the glue and for the algorithms that call PyTorch's own operators.
#pragma once
#include "tensors.h"

namespace ai3::ops {

struct LinearCall {
  explicit LinearCall(Arguments& in)
      : input(in.take<Tensor>()),
        weight(in.take<Tensor>()),
        bias(in.take<std::optional<Tensor>>()),
        allow_tf32(in.take<bool>()),
        deterministic(in.take<bool>()) {}
  Tensor input, weight;
  std::optional<Tensor> bias;
  bool allow_tf32, deterministic;
  std::optional<Tensor> output;  // what an algorithm of PyTorch's operators leaves
};

}  // namespace ai3::ops

// The arguments of one conv2d call, for the glue and for the algorithms that call PyTorch's own operators.
#pragma once
#include "tensors.h"

namespace ai3::ops {

struct Conv2dCall {
  explicit Conv2dCall(Arguments& in)
      : input(in.take<Tensor>()),
        weight(in.take<Tensor>()),
        bias(in.take<std::optional<Tensor>>()),
        stride(in.take<Sizes>()),
        padding(in.take<Sizes>()),
        dilation(in.take<Sizes>()),
        groups(in.take<int64_t>()),
        allow_tf32(in.take<bool>()),
        deterministic(in.take<bool>()) {}
  Tensor input, weight;
  std::optional<Tensor> bias;
  Sizes stride, padding, dilation;
  int64_t groups;
  bool allow_tf32, deterministic;
  bool unbatched = false;        // then `input` has got a batch dimension of 1
  bool channels_last = false;    // the memory format that the output must have
  std::optional<Tensor> output;  // what an algorithm of PyTorch's operators leaves
};

}  // namespace ai3::ops

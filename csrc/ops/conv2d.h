// The arguments of one conv2d call, for the glue and for the algorithms that call PyTorch's own operators.
#pragma once
#include "tensors.h"

namespace ai3::ops {

struct Conv2dCall {
  Tensor input, weight;  // the weight is a packed one where weight_size is given
  Sizes weight_size;
  std::optional<Tensor> bias;
  Sizes stride, padding, dilation;
  int64_t groups = 1;
  std::optional<Tensor> residual;
  Activation activation = Activation::none;
  bool allow_tf32 = false, deterministic = false;
  std::optional<Tensor> output;  // where to write, when it is given; what an algorithm of PyTorch's operators leaves
  bool unbatched = false;        // then `input` has got a batch dimension of 1
  bool channels_last = false;    // the memory format that the output must have

  void take_window(Arguments& in) {
    stride = in.take<Sizes>(), padding = in.take<Sizes>(), dilation = in.take<Sizes>(), groups = in.take<int64_t>();
  }
  void take_options(Arguments& in) { allow_tf32 = in.take<bool>(), deterministic = in.take<bool>(); }
};

Tensor conv2d_run(const Entry& asked, Conv2dCall& c);
// Checks the arguments as torch.nn.functional.conv2d does and fills the problem, strides excepted.
Conv2dProblem conv2d_problem(const Entry& entry, Conv2dCall& c, const Sizes& weight);

// Gradients of c's input and weight by the algorithms named (null: PyTorch's own), and of its bias. `grad` has the output's
// sizes.
Gradients conv2d_backward(const Entry& asked, Conv2dCall& c, const Tensor& grad, const std::vector<bool>& wanted,
                          const Entry* backward_input, const Entry* backward_weight);

}  // namespace ai3::ops

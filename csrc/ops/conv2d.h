// The arguments of one conv2d call, for the glue and for the algorithms that call PyTorch's own operators.
#pragma once
#include "../algos/conv2d/problem.h"
#include "prepare/weighted.h"

namespace ai3::ops {

struct Conv2dCall : WeightedCall {
  Sizes stride, padding, dilation;
  std::optional<Tensor> input_scale, input_shift;
  bool input_relu = false;
  int64_t groups = 1;
  bool is_sequence = false;    // the output is contiguous whatever memory format an image's weight would suggest
  bool unbatched = false;      // then `input` has got a batch dimension of 1
  bool channels_last = false;  // the memory format that the output must have

  void take_window(Arguments& in) {
    stride = in.take_list(2), padding = in.take_list(2), dilation = in.take_list(2), groups = in.take<int64_t>();
  }
  void take_prologue(Arguments& in) {
    input_scale = in.take<std::optional<Tensor>>(), input_shift = in.take<std::optional<Tensor>>(), input_relu = in.take<bool>();
  }
  bool has_prologue() const { return input_scale || input_shift || input_relu; }
};

// The problem that a query describes, with its output's sizes and dense strides.
Conv2dProblem conv2d_from(const Query& q);

Tensor conv2d_run(const Entry& asked, Conv2dCall& c);
// Checks the arguments as torch.nn.functional.conv2d does and fills the problem, strides excepted.
Conv2dProblem conv2d_problem(const Entry& entry, Conv2dCall& c, const Sizes& weight);

// Gradients of c's input and weight by the algorithms named (null: PyTorch's own), and of its bias. `grad` has the output's
// sizes.
Gradients conv2d_backward(const Entry& asked, Conv2dCall& c, const Tensor& grad, const std::vector<bool>& wanted,
                          GradientEntries by);

// What WeightedOperators asks.
struct Conv2dOperation {
  using Call = Conv2dCall;
  using Problem = Conv2dProblem;
  static constexpr size_t weight_rank = 4;

  static const Operation& operation();
  static Problem problem(const Entry& entry, Call& c);
  static Problem problem_of_weight(const Entry& entry, Call& c);
  static auto description(const Problem& p) { return pack_description(p); }
  static constexpr auto run = conv2d_run;
  static constexpr auto gradients = conv2d_backward;
};

}  // namespace ai3::ops

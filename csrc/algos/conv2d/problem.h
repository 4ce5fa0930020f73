// What conv2d computes: y[n][k][i][j] = bias[k] + sum over c, r, s of w[k][c][r][s] * x[n][g(k) + c][i*stride_h + r*dilation_h -
// pad_h][...], as torch.nn.functional.conv2d.
#pragma once
#include "../core/algorithm.h"

namespace ai3 {

struct Conv2dOperands {
  Operand input = {}, weight = {}, bias = {}, residual = {};  // `weight` is the packed form where the algorithm packs
  Operand output = {};
  Operand scale = {}, shift = {};  // of the prologue: one of the accumulator's type for each input channel
  Operand slope = {};              // of an activation that has one: one of the accumulator's type for each output channel
  template <class T, class Body>
  AI3_INLINE void plain(const Body& body) const {
    body(input.read<T>(), weight.read<T>(), bias.read<T>(), output.write<T>());
  }
};

struct Conv2dProblem {
  using Operands = Conv2dOperands;
  using Gradients = WeightedGradients;
  DType dtype;
  int32_t threads;  // how many may be used
  int64_t batch, in_channels, in_height, in_width;
  int64_t out_channels, kernel_height, kernel_width;
  int64_t out_height, out_width;
  int64_t stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, groups;
  // Both dense, NCHW or NHWC (c == 1), or, for `sliced` algorithms, slices of such; the residual has y's, and may be y itself; w
  // is contiguous (K, C/groups, R, S).
  Strides4 x_stride, y_stride;
  Activation activation;
  bool has_bias, has_residual, has_prologue, input_relu, allow_tf32, deterministic;
  const char* exclude;   // patterns of algorithms that a rule may not choose, between commas; null: none
  bool packed_for_call;  // the packed weight is of this call alone, and still in the caches of the cores that packed it
  Parameters parameters = {};
};

// Whether every size is known (not -1): what memory takes can only be told then.
AI3_INLINE bool sizes_known(const Conv2dProblem& p) {
  return (p.batch | p.in_channels | p.in_height | p.in_width | p.out_channels | p.kernel_height | p.kernel_width | p.out_height |
          p.out_width | p.stride_h | p.stride_w | p.pad_h | p.pad_w | p.dilation_h | p.dilation_w | p.groups) >= 0;
}
// The binding fits no struct with a member more, so that none is forgotten. `exclude` is left out: problems that have one are not
// kept.
AI3_INLINE auto value_of(const Conv2dProblem& p) {
  const auto& [dtype, threads, n, c, h, w, k, r, s, oh, ow, sh, sw, ph, pw, dh, dw, groups, x, y, activation, bias, residual,
               prologue, relu, tf32, deterministic, exclude, packed, parameters] = p;
  return as_numbers(dtype, threads, n, c, h, w, k, r, s, oh, ow, sh, sw, ph, pw, dh, dw, groups, x, y, activation, bias, residual,
                    prologue, relu, tf32, deterministic, packed, parameters);
}
// What a packed weight may depend on, and whether that much is known.
AI3_INLINE auto pack_description(const Conv2dProblem& p) {
  return as_numbers(p.dtype, p.in_channels, p.out_channels, p.kernel_height, p.kernel_width, p.stride_h, p.stride_w, p.pad_h,
                    p.pad_w, p.dilation_h, p.dilation_w, p.groups, p.parameters);
}
AI3_INLINE bool weight_known(const Conv2dProblem& p) {
  return (p.in_channels | p.out_channels | p.kernel_height | p.kernel_width | p.stride_h | p.stride_w | p.dilation_h |
          p.dilation_w | p.groups) >= 0;
}
AI3_INLINE std::array<int64_t, 4> weight_sizes(const Conv2dProblem& p) {
  return {p.out_channels, p.in_channels / p.groups, p.kernel_height, p.kernel_width};
}

// 1x1 with stride 1 and no padding: a GEMM of channels and pixels.
AI3_INLINE bool is_pointwise(const Conv2dProblem& p) {
  return p.kernel_height == 1 && p.kernel_width == 1 && p.stride_h == 1 && p.stride_w == 1 && p.pad_h == 0 && p.pad_w == 0;
}

namespace problem_of {
using conv2d = Conv2dProblem;
}  // namespace problem_of

}  // namespace ai3

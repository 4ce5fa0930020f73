// Plain descriptions of what to compute: no tensors, no ownership. Sizes are in elements unless a name says otherwise.
#pragma once
#include <cstdint>

#include "dtype.h"

namespace ai3 {

// Fused into the store, after bias and residual. The last two have a number for each output channel: prelu its slope below zero,
// which leaky ReLU has, too, elu its alpha.
enum class Activation : int32_t { none, relu, relu6, hardswish, silu, gelu, sigmoid, hardsigmoid, tanh, gelu_tanh, prelu, elu };
AI3_INLINE constexpr bool has_slope(Activation a) { return a >= Activation::prelu; }

struct Strides4 {
  int64_t n, c, h, w;
};

// y[n][k][i][j] = bias[k] + sum over c, r, s of w[k][c][r][s] * x[n][g(k) + c][i*stride_h + r*dilation_h - pad_h][...],
// as torch.nn.functional.conv2d. A size of -1 is unknown (in queries only: `supports` may then
// not depend on it, rules and costs make do without it).
struct Conv2dProblem {
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
};

// Whether every size is known (not -1), of this and of the other problems: what memory takes can only be told then.
AI3_INLINE bool sizes_known(const Conv2dProblem& p) {
  return (p.batch | p.in_channels | p.in_height | p.in_width | p.out_channels | p.kernel_height | p.kernel_width | p.out_height |
          p.out_width | p.stride_h | p.stride_w | p.pad_h | p.pad_w | p.dilation_h | p.dilation_w | p.groups) >= 0;
}

// 1x1 with stride 1 and no padding: a GEMM of channels and pixels.
AI3_INLINE bool is_pointwise(const Conv2dProblem& p) {
  return p.kernel_height == 1 && p.kernel_width == 1 && p.stride_h == 1 && p.stride_w == 1 && p.pad_h == 0 && p.pad_w == 0;
}

// y[m][n] = bias[n] + sum over k of x[m][k] * w[n][k]; w is contiguous.
struct LinearProblem {
  DType dtype;
  int32_t threads;
  int64_t rows, in_features, out_features;
  Activation activation;
  bool has_bias, has_residual, allow_tf32, deterministic;
  const char* exclude;  // as in Conv2dProblem
  // Elements from one row to the next: in_features and out_features or, for `sliced` algorithms, more. The residual has y's, and
  // may be y itself.
  int64_t x_row, y_row;
};

AI3_INLINE bool sizes_known(const LinearProblem& p) { return (p.rows | p.in_features | p.out_features) >= 0; }
AI3_INLINE LinearProblem with_dense_rows(LinearProblem p) {
  p.x_row = p.in_features, p.y_row = p.out_features;
  return p;
}

// Pooling over windows; adaptive pooling uses only the sizes.
struct Pool2dProblem {
  DType dtype;
  int32_t threads;
  int64_t batch, channels, in_height, in_width, out_height, out_width;
  int64_t kernel_height, kernel_width, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
  int64_t divisor;  // avg_pool2d's divisor_override, 0 when absent
  bool ceil_mode, count_include_pad;
  Strides4 x_stride, y_stride;  // as in Conv2dProblem
};
AI3_INLINE bool sizes_known(const Pool2dProblem& p) {
  return (p.batch | p.channels | p.in_height | p.in_width | p.out_height | p.out_width) >= 0;
}

// One pass over `count` elements (relu, flatten): contiguous or, for `sliced` algorithms, in rows of `row` elements, x_row and
// y_row apart. y may be x itself.
struct ElementwiseProblem {
  DType dtype;
  int32_t threads;
  int64_t count;
  int64_t row, x_row, y_row;  // all `count` where everything is contiguous
};
AI3_INLINE bool sizes_known(const ElementwiseProblem& p) { return p.count >= 0; }
AI3_INLINE ElementwiseProblem contiguous_elements(DType dtype, int32_t threads, int64_t count) {
  return {dtype, threads, count, count, count, count};
}

}  // namespace ai3

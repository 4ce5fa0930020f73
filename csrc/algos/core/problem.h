// Plain descriptions of what to compute: no tensors, no ownership. Sizes are in elements unless a name says otherwise.
#pragma once
#include <cstdint>

#include "dtype.h"

namespace ai3 {

// Fused into the store of a packed operator, after bias and residual.
enum class Activation : int32_t { none, relu, relu6, hardswish, silu, gelu };

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
  // Both dense, NCHW or NHWC (c == 1), or, for `sliced` algorithms, slices of such; the residual has y's; w is contiguous
  // (K, C/groups, R, S).
  Strides4 x_stride, y_stride;
  Activation activation;
  bool has_bias, has_residual, has_prologue, input_relu, allow_tf32, deterministic;
  const char* exclude;   // patterns of algorithms that a rule may not choose, between commas; null: none
  bool packed_for_call;  // the packed weight is of this call alone, and still in the caches of the cores that packed it
};

// 1x1 with stride 1 and no padding: a GEMM of channels and pixels.
AI3_INLINE bool is_pointwise(const Conv2dProblem& p) {
  return p.kernel_height == 1 && p.kernel_width == 1 && p.stride_h == 1 && p.stride_w == 1 && p.pad_h == 0 && p.pad_w == 0;
}

// y[m][n] = bias[n] + sum over k of x[m][k] * w[n][k]; everything contiguous.
struct LinearProblem {
  DType dtype;
  int32_t threads;
  int64_t rows, in_features, out_features;
  Activation activation;
  bool has_bias, has_residual, allow_tf32, deterministic;
  const char* exclude;  // as in Conv2dProblem
};

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

// One pass over `count` contiguous elements (relu, flatten).
struct ElementwiseProblem {
  DType dtype;
  int32_t threads;
  int64_t count;
};

}  // namespace ai3

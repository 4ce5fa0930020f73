// Pooling over windows; adaptive pooling uses only the sizes.
#pragma once
#include "algorithm.h"

namespace ai3 {

struct Pool2dProblem {
  using Operands = UnaryOperands;
  using Gradients = UnaryGradients;
  DType dtype;
  int32_t threads;
  int64_t batch, channels, in_height, in_width, out_height, out_width;
  int64_t kernel_height, kernel_width, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
  int64_t divisor;  // avg_pool2d's divisor_override, 0 when absent
  bool ceil_mode, count_include_pad;
  Strides4 x_stride, y_stride;  // both dense, NCHW or NHWC, or, for `sliced` algorithms, slices of such
  Parameters parameters = {};
};
AI3_INLINE bool sizes_known(const Pool2dProblem& p) {
  return (p.batch | p.channels | p.in_height | p.in_width | p.out_height | p.out_width) >= 0;
}
AI3_INLINE auto value_of(const Pool2dProblem& p) {
  const auto& [dtype, threads, n, c, h, w, oh, ow, r, s, sh, sw, ph, pw, dh, dw, divisor, ceil, pad_counts, x, y, parameters] = p;
  return as_numbers(dtype, threads, n, c, h, w, oh, ow, r, s, sh, sw, ph, pw, dh, dw, divisor, ceil, pad_counts, x, y,
                    parameters);
}

}  // namespace ai3

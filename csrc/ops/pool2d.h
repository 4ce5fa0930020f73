// What the 2-D poolings share: windows, output sizes and the way from tensors to kernels.
#pragma once
#include "tensors.h"

namespace ai3::ops {

struct Pool2dCall {
  Tensor input;
  Sizes kernel, stride, padding, dilation;  // empty stride: the kernel's size
  bool ceil_mode = false, count_include_pad = true;
  std::optional<int64_t> divisor = {};
};

// Checks the arguments as ATen does and runs the algorithm.
Tensor pool2d_run(const Entry& asked, Pool2dCall& call);
// The same for windows that follow from the sizes.
Tensor adaptive_pool2d_run(const Entry& asked, const Tensor& input, Sizes output_size);

#define AI3_POOL2D_SIZES                                                                                              \
  "batch channels in_height in_width kernel_height kernel_width stride_h stride_w pad_h pad_w dilation_h dilation_w " \
  "ceil_mode count_include_pad divisor channels_last"
Pool2dProblem pool2d_from(const Query& q);
Pool2dProblem adaptive_pool2d_from(const Query& q);

}  // namespace ai3::ops

// Who computes the gradients of a convolution, and the convolution that the input's gradient is.
#pragma once
#include "problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

// Gradients are products with the matrix of patches, which implicit_gemm computes. A few channels or filters in each group fill
// no panel of it: then PyTorch's operators do.
inline GradientNames by_patches(const Conv2dProblem& p) {
  const bool fill = p.out_channels / p.groups >= 8 && p.in_channels / p.groups * p.kernel_height * p.kernel_width >= 16;
  const char* name = fill ? "implicit_gemm" : nullptr;
  return {name, name};
}

// With stride 1, dX is the convolution of dY with the weights turned by 180 degrees, input and output channels exchanged in each
// group, and padding d (k - 1) - p: any method that can do that convolution computes it.
AI3_INLINE Conv2dProblem transposed(const Conv2dProblem& p) {
  Conv2dProblem t = p;
  t.in_channels = p.out_channels, t.in_height = p.out_height, t.in_width = p.out_width, t.x_stride = p.y_stride;
  t.out_channels = p.in_channels, t.out_height = p.in_height, t.out_width = p.in_width, t.y_stride = p.x_stride;
  t.pad_h = p.dilation_h * (p.kernel_height - 1) - p.pad_h, t.pad_w = p.dilation_w * (p.kernel_width - 1) - p.pad_w;
  t.activation = Activation::none, t.has_bias = t.has_residual = false, t.packed_for_call = true;
  return t;
}

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

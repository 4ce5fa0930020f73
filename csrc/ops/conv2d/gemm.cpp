// The vendor's GEMM, through PyTorch's BLAS: plain where the layer is one (1x1, stride 1), else on an im2col matrix (Chellapilla
// et al., "High performance convolutional neural networks for document processing", 2006). Any stride, padding, dilation and
// groups. Half types go through float32, since the BLAS would round its product to them before the bias is added. The BLAS splits
// its sums by the number of threads, so the last bits depend on that.
#include "../conv2d.h"

namespace ai3::ops {
namespace {

using torch::stable::reshape;

// The im2col matrix; PyTorch allocates it.
int64_t workspace(const Conv2dProblem& p) {
  const int64_t size = p.dtype == DType::f64 ? 8 : 4;
  if (is_pointwise(p)) return 0;
  return checked_product({size, p.batch, p.in_channels, p.kernel_height, p.kernel_width, p.out_height, p.out_width});
}

void conv2d_gemm(const Conv2dProblem& p, void* call) {
  auto& c = *static_cast<Conv2dCall*>(call);
  const int64_t kg = p.out_channels / p.groups, pixels = p.out_height * p.out_width;
  const int64_t depth = p.in_channels / p.groups * p.kernel_height * p.kernel_width;
  const Sizes kernel = {p.kernel_height, p.kernel_width};
  const ScalarType dtype = c.input.scalar_type();
  auto widened = [&](const Tensor& t) { return size_of(p.dtype) == 2 ? torch::stable::to(t, ScalarType::Float) : t; };
  const Tensor columns =
      is_pointwise(p) ? c.input : call_aten("aten::im2col", "", c.input, kernel, c.dilation, c.padding, c.stride);
  // (1, g, K/g, depth) x (N, g, depth, pixels)
  const Tensor w = reshape(widened(c.weight), Sizes{1, p.groups, kg, depth});
  Tensor y = reshape(torch::stable::matmul(w, reshape(widened(columns), Sizes{p.batch, p.groups, depth, pixels})),
                     Sizes{p.batch, p.out_channels, p.out_height, p.out_width});
  // PyTorch's add takes a Scalar, which the stable ABI cannot pass; y - (-b) is the same to the bit.
  if (c.bias) y = torch::stable::subtract(y, call_aten("aten::neg", "", reshape(widened(*c.bias), Sizes{p.out_channels, 1, 1})));
  c.result = dense(size_of(p.dtype) == 2 ? torch::stable::to(y, dtype) : y, c.channels_last);
}

AI3_ALGORITHM_WITHOUT_KERNEL(conv2d, gemm, .deterministic = false, .workspace = workspace, .tensors = conv2d_gemm)

}  // namespace
}  // namespace ai3::ops

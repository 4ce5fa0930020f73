#include "../../algos/conv2d/problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

// Of strict float32, 3x3 windows of many channels and pixels are fastest by Winograd's: 0.33 to 0.68 of PyTorch's time on an H200
// (docs/benchmarks/cuda.md). Its three launches take the host longer than PyTorch's one, which shows where there is less work.
// What it leaves to PyTorch in a swapped model (conv2d.py's `measured`), a direct call computes by im2col, which supports all.
Choice choose(const Conv2dProblem& p, const Candidates<Conv2dProblem>&) {
  constexpr int64_t kChannels = 64, kWork = int64_t{1} << 28;
  const bool strict = p.dtype == DType::f32 && !p.allow_tf32,
             plain = p.stride_h == 1 && p.stride_w == 1 && p.dilation_h == 1 && p.dilation_w == 1 && p.groups == 1;
  const bool window = p.kernel_height == 3 && p.kernel_width == 3,
             many = p.in_channels >= kChannels && p.out_channels >= kChannels;
  if (!strict || !plain || !window || !many || !sizes_known(p)) return {"im2col"};
  const bool large = checked_product({p.batch, p.in_height, p.in_width, p.in_channels, p.out_channels}) >= kWork;
  return {large ? "winograd_f4" : "im2col"};
}

AI3_ALGORITHM_WITHOUT_KERNEL(conv2d, default, .accuracy = Accuracy::bounded, .error_bound = 4e-5, .choose = choose)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

// What patch_gemm asks of a convolution: patches that follow one another, so that each pixel belongs to one.
#pragma once
#include "problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

inline bool patches_follow(const Conv2dProblem& p, Reason& reason) {
  auto follow = [](int64_t kernel, int64_t stride, int64_t pad, int64_t dilation) {
    return (kernel == stride || kernel < 0 || stride < 0) && pad <= 0 && (dilation <= 1 || kernel == 1 || kernel < 0);
  };
  if (follow(p.kernel_height, p.stride_h, p.pad_h, p.dilation_h) && follow(p.kernel_width, p.stride_w, p.pad_w, p.dilation_w))
    return true;
  return refuse(reason,
                "needs strides equal to the kernel, no padding and no dilation, got kernel (%lld, %lld), stride (%lld, %lld), "
                "padding (%lld, %lld), dilation (%lld, %lld)",
                static_cast<long long>(p.kernel_height), static_cast<long long>(p.kernel_width),
                static_cast<long long>(p.stride_h), static_cast<long long>(p.stride_w), static_cast<long long>(p.pad_h),
                static_cast<long long>(p.pad_w), static_cast<long long>(p.dilation_h), static_cast<long long>(p.dilation_w));
}
// The same in conv1d's words.
inline bool patches_of_a_line_follow(const Conv2dProblem& p, Reason& reason) {
  if (patches_follow(p, reason)) return true;
  return refuse(reason,
                "needs a stride equal to the kernel, no padding and no dilation, got kernel %lld, stride %lld, padding %lld, "
                "dilation %lld",
                static_cast<long long>(p.kernel_width), static_cast<long long>(p.stride_w), static_cast<long long>(p.pad_w),
                static_cast<long long>(p.dilation_w));
}

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

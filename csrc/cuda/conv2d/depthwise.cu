// Depthwise convolution: every channel has filters of its own, so that an output is a sum of a few taps. A thread computes one,
// and neighbours read neighbouring memory in either layout.
#include "../core/device.cuh"
#include "gradients.cuh"

namespace ai3::inline AI3_LEVEL {
namespace {

template <class T>
void conv2d_depthwise(const Conv2dProblem& p, const T* x, const T* w, const T* b, T* y, Workspace& workspace) {
  const bool channels_last = p.y_stride.c == 1;
  const int64_t multiplier = p.out_channels / p.groups, taps = p.kernel_height * p.kernel_width;
  for_each(p.batch * p.out_channels * p.out_height * p.out_width, workspace, "conv2d_depthwise", [=] __device__(int64_t i) {
    const Place at = place_of(i, p.out_channels, p.out_height, p.out_width, channels_last);
    const T* plane = x + at.n * p.x_stride.n + at.c / multiplier * p.x_stride.c;
    const T* filter = w + at.c * taps;
    Acc<T> sum = b ? load_acc(b + at.c) : Acc<T>(0);
    for (int64_t r = 0; r < p.kernel_height; r++) {
      const int64_t h = at.h * p.stride_h - p.pad_h + r * p.dilation_h;
      if (h < 0 || h >= p.in_height) continue;
      for (int64_t s = 0; s < p.kernel_width; s++) {
        const int64_t v = at.w * p.stride_w - p.pad_w + s * p.dilation_w;
        if (v >= 0 && v < p.in_width)
          sum += load_acc(plane + h * p.x_stride.h + v * p.x_stride.w) * load_acc(filter + r * p.kernel_width + s);
      }
    }
    store_acc(y + offset_of(at, p.y_stride), sum);
  });
}

bool depthwise_supports(const Conv2dProblem& p, Reason& reason) {
  if (!device_supports(p, reason)) return false;
  if (p.groups < 0 || p.in_channels < 0 || p.groups == p.in_channels) return true;
  return refuse(reason, "needs as many groups as input channels, got groups %lld of %lld channels",
                static_cast<long long>(p.groups), static_cast<long long>(p.in_channels));
}

AI3_ALGORITHM(conv2d, depthwise, .supports = depthwise_supports, .gradients = gradients_by_im2col)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

#include "../../algos/max_pool2d/problem.h"
#include "../core/device.cuh"

namespace ai3::inline AI3_LEVEL {
namespace {

template <class T>
void max_pool2d_direct(const Pool2dProblem& p, const T* x, T* y, Workspace& workspace) {
  const bool channels_last = p.y_stride.c == 1;
  for_each(p.batch * p.channels * p.out_height * p.out_width, workspace, "max_pool2d_direct", [=] __device__(int64_t i) {
    const Place at = place_of(i, p.channels, p.out_height, p.out_width, channels_last);
    const T* plane = x + at.n * p.x_stride.n + at.c * p.x_stride.c;
    Acc<T> best = -INFINITY;
    for (int64_t r = 0; r < p.kernel_height; r++) {
      const int64_t h = at.h * p.stride_h - p.pad_h + r * p.dilation_h;
      if (h < 0 || h >= p.in_height) continue;
      for (int64_t s = 0; s < p.kernel_width; s++) {
        const int64_t v = at.w * p.stride_w - p.pad_w + s * p.dilation_w;
        if (v < 0 || v >= p.in_width) continue;
        const Acc<T> value = load_acc(plane + h * p.x_stride.h + v * p.x_stride.w);
        if (value > best || value != value) best = value;  // NaN wins, as in ATen
      }
    }
    store_acc(y + offset_of(at, p.y_stride), best);
  });
}

AI3_ALGORITHM(max_pool2d, direct, .supports = device_supports<Pool2dProblem>)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

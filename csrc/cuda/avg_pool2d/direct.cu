#include "../../algos/avg_pool2d/problem.h"
#include "../core/device.cuh"

namespace ai3::inline AI3_LEVEL {
namespace {

template <class T>
void avg_pool2d_direct(const Pool2dProblem& p, const T* x, T* y, Workspace& workspace) {
  const bool channels_last = p.y_stride.c == 1;
  for_each(p.batch * p.channels * p.out_height * p.out_width, workspace, "avg_pool2d_direct", [=] __device__(int64_t i) {
    const Place at = place_of(i, p.channels, p.out_height, p.out_width, channels_last);
    const T* plane = x + at.n * p.x_stride.n + at.c * p.x_stride.c;
    int64_t h0 = at.h * p.stride_h - p.pad_h, w0 = at.w * p.stride_w - p.pad_w;
    int64_t h1 = min(h0 + p.kernel_height, p.in_height + p.pad_h), w1 = min(w0 + p.kernel_width, p.in_width + p.pad_w);
    const int64_t padded = (h1 - h0) * (w1 - w0);
    h0 = max(h0, int64_t{0}), w0 = max(w0, int64_t{0}), h1 = min(h1, p.in_height), w1 = min(w1, p.in_width);
    Acc<T> sum = 0;
    for (int64_t h = h0; h < h1; h++)
      for (int64_t v = w0; v < w1; v++) sum += load_acc(plane + h * p.x_stride.h + v * p.x_stride.w);
    const int64_t divisor = p.divisor ? p.divisor : p.count_include_pad ? padded : (h1 - h0) * (w1 - w0);
    store_acc(y + offset_of(at, p.y_stride), h0 >= h1 || w0 >= w1 ? Acc<T>(0) : sum / static_cast<Acc<T>>(divisor));
  });
}

AI3_ALGORITHM(avg_pool2d, direct, .supports = device_supports<Pool2dProblem>)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

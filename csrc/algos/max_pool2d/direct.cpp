// thin first version
#include "../core/algorithm.h"

namespace ai3::inline AI3_LEVEL {
namespace {

template <class T>
void max_pool2d_direct(const Pool2dProblem& p, const T* x, T* y, Workspace&) {
  parallel_for(p.threads, p.batch * p.channels, [&](int64_t i, int) {
    const int64_t n = i / p.channels, c = i % p.channels;
    const T* plane = x + n * p.x_stride.n + c * p.x_stride.c;
    for (int64_t oh = 0; oh < p.out_height; oh++)
      for (int64_t ow = 0; ow < p.out_width; ow++) {
        Acc<T> result = -__builtin_inff();
        for (int64_t r = 0; r < p.kernel_height; r++)
          for (int64_t s = 0; s < p.kernel_width; s++) {
            const int64_t h = oh * p.stride_h - p.pad_h + r * p.dilation_h, v = ow * p.stride_w - p.pad_w + s * p.dilation_w;
            if (h < 0 || h >= p.in_height || v < 0 || v >= p.in_width) continue;
            const Acc<T> value = widen(plane[h * p.x_stride.h + v * p.x_stride.w]);
            if (value > result || value != value) result = value;
          }
        y[n * p.y_stride.n + c * p.y_stride.c + oh * p.y_stride.h + ow * p.y_stride.w] = narrowed<T>(result);
      }
  });
}

AI3_ALGORITHM(max_pool2d, direct)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

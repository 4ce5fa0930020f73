// thin first version
#include "../core/algorithm.h"

namespace ai3::inline AI3_LEVEL {
namespace {

template <class T>
void conv2d_direct(const Conv2dProblem& p, const T* x, const T* w, const T* b, T* y, Workspace&) {
  const int64_t cg = p.in_channels / p.groups, kg = p.out_channels / p.groups;
  parallel_for(p.threads, p.batch * p.out_channels, [&](int64_t i, int) {
    const int64_t n = i / p.out_channels, k = i % p.out_channels, c0 = k / kg * cg;
    for (int64_t oh = 0; oh < p.out_height; oh++)
      for (int64_t ow = 0; ow < p.out_width; ow++) {
        Acc<T> sum = b ? widen(b[k]) : 0;
        for (int64_t c = 0; c < cg; c++)
          for (int64_t r = 0; r < p.kernel_height; r++)
            for (int64_t s = 0; s < p.kernel_width; s++) {
              const int64_t h = oh * p.stride_h - p.pad_h + r * p.dilation_h, v = ow * p.stride_w - p.pad_w + s * p.dilation_w;
              if (h < 0 || h >= p.in_height || v < 0 || v >= p.in_width) continue;
              sum = fma1<Acc<T>>(widen(w[((k * cg + c) * p.kernel_height + r) * p.kernel_width + s]),
                        widen(x[n * p.x_stride.n + (c0 + c) * p.x_stride.c + h * p.x_stride.h + v * p.x_stride.w]), sum);
            }
        y[n * p.y_stride.n + k * p.y_stride.c + oh * p.y_stride.h + ow * p.y_stride.w] = narrowed<T>(sum);
      }
  });
}

AI3_ALGORITHM(conv2d, direct)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

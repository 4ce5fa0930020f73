// thin first version
#include "../core/algorithm.h"

namespace ai3::inline AI3_LEVEL {
namespace {

template <class T>
void adaptive_avg_pool2d_direct(const Pool2dProblem& p, const T* x, T* y, Workspace&) {
  parallel_for(p.threads, p.batch * p.channels, [&](int64_t i, int) {
    const int64_t n = i / p.channels, c = i % p.channels;
    const T* plane = x + n * p.x_stride.n + c * p.x_stride.c;
    for (int64_t oh = 0; oh < p.out_height; oh++)
      for (int64_t ow = 0; ow < p.out_width; ow++) {
        const int64_t h0 = oh * p.in_height / p.out_height, h1 = ceil_div((oh + 1) * p.in_height, p.out_height);
        const int64_t w0 = ow * p.in_width / p.out_width, w1 = ceil_div((ow + 1) * p.in_width, p.out_width);
        Acc<T> sum = 0;
        for (int64_t h = h0; h < h1; h++)
          for (int64_t v = w0; v < w1; v++) sum += widen(plane[h * p.x_stride.h + v * p.x_stride.w]);
        const Acc<T> result = sum / static_cast<Acc<T>>((h1 - h0) * (w1 - w0));
        y[n * p.y_stride.n + c * p.y_stride.c + oh * p.y_stride.h + ow * p.y_stride.w] = narrowed<T>(result);
      }
  });
}

AI3_ALGORITHM(adaptive_avg_pool2d, direct)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

// thin first version
#include "../core/algorithm.h"

namespace ai3::inline AI3_LEVEL {
namespace {

template <class T>
void avg_pool2d_direct(const Pool2dProblem& p, const T* x, T* y, Workspace&) {
  parallel_for(p.threads, p.batch * p.channels, [&](int64_t i, int) {
    const int64_t n = i / p.channels, c = i % p.channels;
    const T* plane = x + n * p.x_stride.n + c * p.x_stride.c;
    for (int64_t oh = 0; oh < p.out_height; oh++)
      for (int64_t ow = 0; ow < p.out_width; ow++) {
        auto most = [](int64_t a, int64_t b) { return a > b ? a : b; };
        auto least = [](int64_t a, int64_t b) { return a < b ? a : b; };
        int64_t h0 = oh * p.stride_h - p.pad_h, w0 = ow * p.stride_w - p.pad_w;
        int64_t h1 = least(h0 + p.kernel_height, p.in_height + p.pad_h), w1 = least(w0 + p.kernel_width, p.in_width + p.pad_w);
        const int64_t padded = (h1 - h0) * (w1 - w0);
        h0 = most(h0, 0), w0 = most(w0, 0), h1 = least(h1, p.in_height), w1 = least(w1, p.in_width);
        Acc<T> sum = 0;
        for (int64_t h = h0; h < h1; h++)
          for (int64_t v = w0; v < w1; v++) sum += widen(plane[h * p.x_stride.h + v * p.x_stride.w]);
        const Acc<T> result = sum / static_cast<Acc<T>>(p.divisor ? p.divisor : p.count_include_pad ? padded : (h1 - h0) * (w1 - w0));
        y[n * p.y_stride.n + c * p.y_stride.c + oh * p.y_stride.h + ow * p.y_stride.w] = narrowed<T>(result);
      }
  });
}

AI3_ALGORITHM(avg_pool2d, direct)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

// Direct convolution: every output is its own sum of products, without workspace. A thread computes kChannels output channels of
// one pixel, so that an input element that it has read serves that many products.
#include "../core/device.cuh"

namespace ai3::inline AI3_LEVEL {
namespace {

constexpr int kChannels = 4;

template <class T>
void conv2d_direct(const Conv2dProblem& p, const T* x, const T* w, const T* b, T* y, Workspace& workspace) {
  const int64_t channels = p.in_channels / p.groups, kernels = p.out_channels / p.groups;
  const int64_t packs = ceil_div(kernels, kChannels), taps = p.kernel_height * p.kernel_width;
  const bool channels_last = p.y_stride.c == 1;
  for_each(p.batch * p.groups * packs * p.out_height * p.out_width, workspace, "conv2d_direct", [=] __device__(int64_t i) {
    const Place at = place_of(i, p.groups * packs, p.out_height, p.out_width, channels_last);
    const int64_t group = at.c / packs, k0 = group * kernels + at.c % packs * kChannels;
    const int64_t count = min(static_cast<int64_t>(kChannels), (group + 1) * kernels - k0);
    Acc<T> sum[kChannels];
#pragma unroll
    for (int j = 0; j < kChannels; j++) sum[j] = b && j < count ? load_acc(b + k0 + j) : Acc<T>(0);
    const int64_t h0 = at.h * p.stride_h - p.pad_h, w0 = at.w * p.stride_w - p.pad_w;
    const T* xg = x + at.n * p.x_stride.n + group * channels * p.x_stride.c;
    for (int64_t r = 0; r < p.kernel_height; r++) {
      const int64_t h = h0 + r * p.dilation_h;
      if (h < 0 || h >= p.in_height) continue;
      for (int64_t s = 0; s < p.kernel_width; s++) {
        const int64_t v = w0 + s * p.dilation_w;
        if (v < 0 || v >= p.in_width) continue;
        const T* xs = xg + h * p.x_stride.h + v * p.x_stride.w;
        const T* ws = w + k0 * channels * taps + r * p.kernel_width + s;
        for (int64_t c = 0; c < channels; c++) {
          const Acc<T> value = load_acc(xs + c * p.x_stride.c);
#pragma unroll
          for (int j = 0; j < kChannels; j++)
            if (j < count) sum[j] += value * load_acc(ws + (j * channels + c) * taps);
        }
      }
    }
    T* out = y + at.n * p.y_stride.n + k0 * p.y_stride.c + at.h * p.y_stride.h + at.w * p.y_stride.w;
#pragma unroll
    for (int j = 0; j < kChannels; j++)
      if (j < count) store_acc(out + j * p.y_stride.c, sum[j]);
  });
}

AI3_ALGORITHM(conv2d, direct)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

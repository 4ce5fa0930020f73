// Direct convolution: every output is its own sum of products, without workspace. A thread computes kChannels output channels of
// one pixel, so that an input element that it has read serves that many products.
#include "../../algos/conv2d/delegated.h"
#include "../core/device.cuh"
#include "gradients.cuh"

namespace ai3::inline AI3_LEVEL {
namespace {

constexpr int kChannels = 4;

// The sum of one thread. Index is int32_t wherever every offset fits, which halves the registers and the cost of its divisions.
template <class T, class Index>
struct DirectSum {
  Index channels, kernels, packs, taps, groups, out_height, out_width, in_height, in_width, kernel_height, kernel_width;
  Index stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
  Index xn, xc, xh, xw, yn, yc, yh, yw;
  bool channels_last;
  const T *x, *w, *b;
  T* y;

  DirectSum(const Conv2dProblem& p, const T* x_, const T* w_, const T* b_, T* y_) : x(x_), w(w_), b(b_), y(y_) {
    auto to = [](int64_t value) { return static_cast<Index>(value); };
    channels = to(p.in_channels / p.groups), kernels = to(p.out_channels / p.groups);
    packs = to(ceil_div(p.out_channels / p.groups, kChannels)), taps = to(p.kernel_height * p.kernel_width),
    groups = to(p.groups);
    out_height = to(p.out_height), out_width = to(p.out_width), in_height = to(p.in_height), in_width = to(p.in_width);
    kernel_height = to(p.kernel_height), kernel_width = to(p.kernel_width), stride_h = to(p.stride_h), stride_w = to(p.stride_w);
    pad_h = to(p.pad_h), pad_w = to(p.pad_w), dilation_h = to(p.dilation_h), dilation_w = to(p.dilation_w);
    xn = to(p.x_stride.n), xc = to(p.x_stride.c), xh = to(p.x_stride.h), xw = to(p.x_stride.w);
    yn = to(p.y_stride.n), yc = to(p.y_stride.c), yh = to(p.y_stride.h), yw = to(p.y_stride.w);
    channels_last = p.y_stride.c == 1;
  }

  __device__ void operator()(int64_t index) const {
    Index i = static_cast<Index>(index), column, row, pack, n;
    if (channels_last) {
      pack = i % (groups * packs), i /= groups * packs;
      column = i % out_width, i /= out_width;
      row = i % out_height, n = i / out_height;
    } else {
      column = i % out_width, i /= out_width;
      row = i % out_height, i /= out_height;
      pack = i % (groups * packs), n = i / (groups * packs);
    }
    const Index group = pack / packs, k0 = group * kernels + pack % packs * kChannels;
    const Index rest = (group + 1) * kernels - k0, count = rest < kChannels ? rest : kChannels;
    Acc<T> sum[kChannels];
#pragma unroll
    for (int j = 0; j < kChannels; j++) sum[j] = b && j < count ? load_acc(b + k0 + j) : Acc<T>(0);
    const Index h0 = row * stride_h - pad_h, w0 = column * stride_w - pad_w;
    const T* xg = x + n * xn + group * channels * xc;
    for (Index r = 0; r < kernel_height; r++) {
      const Index h = h0 + r * dilation_h;
      if (h < 0 || h >= in_height) continue;
      for (Index s = 0; s < kernel_width; s++) {
        const Index v = w0 + s * dilation_w;
        if (v < 0 || v >= in_width) continue;
        const T* xs = xg + h * xh + v * xw;
        const T* ws = w + k0 * channels * taps + r * kernel_width + s;
        for (Index c = 0; c < channels; c++) {
          const Acc<T> value = load_acc(xs + c * xc);
#pragma unroll
          for (int j = 0; j < kChannels; j++)
            if (j < count) sum[j] += value * load_acc(ws + (j * channels + c) * taps);
        }
      }
    }
    T* out = y + n * yn + k0 * yc + row * yh + column * yw;
#pragma unroll
    for (int j = 0; j < kChannels; j++)
      if (j < count) store_acc(out + j * yc, sum[j]);
  }
};

// Whether every index and offset is below 2^31, those of positions in the padding included.
bool fits_32_bits(const Conv2dProblem& p, int64_t count) {
  const int64_t most = INT32_MAX;
  const int64_t height = checked_add(checked_add(p.in_height, 2 * p.pad_h), checked_mul(p.kernel_height, p.dilation_h));
  const int64_t width = checked_add(checked_add(p.in_width, 2 * p.pad_w), checked_mul(p.kernel_width, p.dilation_w));
  return count <= most && checked_product({p.batch, p.in_channels, p.in_height, p.in_width}) <= most &&
         checked_product({p.batch, p.out_channels, p.out_height, p.out_width}) <= most &&
         checked_product({p.out_channels + kChannels, p.in_channels / p.groups, p.kernel_height, p.kernel_width}) <= most &&
         height <= most && width <= most;
}

template <class T>
void conv2d_direct(const Conv2dProblem& p, const T* x, const T* w, const T* b, T* y, Workspace& workspace) {
  const int64_t packs = ceil_div(p.out_channels / p.groups, kChannels);
  const int64_t count = p.batch * p.groups * packs * p.out_height * p.out_width;
  if (fits_32_bits(p, count))
    for_each(count, workspace, "conv2d_direct", DirectSum<T, int32_t>(p, x, w, b, y));
  else
    for_each(count, workspace, "conv2d_direct", DirectSum<T, int64_t>(p, x, w, b, y));
}

AI3_ALGORITHM(conv2d, direct, .supports = device_supports<Conv2dProblem>, .gradients = gradients_by_im2col)

}  // namespace

const Algorithm<Conv2dProblem>& conv2d_direct_record() { return conv2d_direct_algorithm; }

}  // namespace ai3::inline AI3_LEVEL

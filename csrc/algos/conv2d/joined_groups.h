// Groups with as many channels as filters, of which one fills a vector exactly, or neighbours together. Then lane l of a
// pixel's channels belongs to the group of filter l, and gradients need no panel for each group. NHWC.
#pragma once
#include "../core/lanes.h"
#include "problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

constexpr int kGroupColumns = 3;  // of the kernels that GroupRow computes

// Of a vector of the accumulator's type.
AI3_INLINE int64_t lanes_of(const Conv2dProblem& p) { return AI3_VECTOR_BYTES / (p.dtype == DType::f64 ? 8 : 4); }
// Whether several lie in a vector, or one fills it. Without AVX2 no instruction brings any lane to any other.
AI3_INLINE bool groups_share_vectors(const Conv2dProblem& p) {
  const int64_t filters = p.groups > 1 ? p.out_channels / p.groups : 0;
  return AI3_VECTOR_BYTES > 16 && p.in_channels == p.out_channels && filters > 0 && lanes_of(p) % filters == 0;
}
AI3_INLINE int64_t groups_of_vector(const Conv2dProblem& p) { return lanes_of(p) / (p.out_channels / p.groups); }
// Whether the last vector is full, too.
AI3_INLINE bool groups_fill_vectors(const Conv2dProblem& p) {
  return groups_share_vectors(p) && p.groups % groups_of_vector(p) == 0;
}
// Whether a kernel has rows of groups (GroupRow), as far as packs know.
AI3_INLINE bool window_has_rows(const Conv2dProblem& p) {
  return groups_share_vectors(p) && size_of(p.dtype) >= 4 && p.kernel_width == kGroupColumns && p.pad_w < kGroupColumns &&
         p.dilation_w == 1 && p.stride_w <= 2;
}
// How many of them are packed as one; 1 also where there are none.
AI3_INLINE int64_t joined_groups(const Conv2dProblem& p) {
  return groups_fill_vectors(p) || window_has_rows(p) ? groups_of_vector(p) : 1;
}

// Which lane each lane reads.
template <class A>
using Places = decltype(Vec<A>().raw < Vec<A>().raw);
// Of each lane the first of its group, with `channels` channels each.
template <class A>
AI3_INLINE Places<A> first_of_group(int64_t channels) {
  Places<A> first{};
  for (int i = 0; i < Vec<A>::width; i++) first[i] = i & -static_cast<int>(channels);
  return first;
}

// Outputs of a tile, and whether there are such rows (`GroupRow`).
constexpr int kGroupPixels = AI3_VECTOR_BYTES == 64 ? 14 : 7, kFewGroupPixels = 7;
AI3_INLINE bool groups_have_rows(const Conv2dProblem& p) {
  return window_has_rows(p) && p.out_width >= kFewGroupPixels && p.x_stride.c == 1 && p.y_stride.c == 1;
}

// One row of outputs of a vector of groups. `x` is the first pixel of the first row of input that the kernel sees inside the
// image, `w` the weights from that row of the kernel on, [row][column][channel][lane], and `rows` how many of its rows it sees
// there.
template <class A>
struct GroupRow {
  const Conv2dProblem& p;
  const A *x, *w;
  A* y;
  int64_t rows, channels, lanes;  // lanes: of the vector, whose others are no channels
  Vec<A> bias;

  // Each vector of an input pixel is brought to the lanes of its groups once for each channel, and multiplied for all outputs of
  // a tile that see it: a permutation for each product would bound the loop. The last tile reaches back over the one before it.
  template <int pixels, int stride, bool joined, bool whole>
  void tiles() const {
    constexpr int width = Vec<A>::width, reach = (pixels - 1) * stride + kGroupColumns;
    const int64_t x_pixel = p.x_stride.w, x_row = p.dilation_h * p.x_stride.h, w_column = channels * width;
    const Places<A> own = first_of_group<A>(channels);
    for (int64_t tile = 0; tile < p.out_width; tile += pixels) {
      const int64_t column = smaller(tile, p.out_width - pixels), left = column * stride - p.pad_w;
      const int first = static_cast<int>(larger(0, -left)), last = static_cast<int>(smaller(reach, p.in_width - left));
      A* const to = y + column * p.y_stride.w;
      // What the row below adds, and the lines that are written: pixels lie too far apart for the hardware's prefetchers.
      const A* const below = x + left * x_pixel + rows * x_row;
      for (int i = 0; i < pixels * stride; i++) __builtin_prefetch(below + i * x_pixel);
      for (int j = 0; j < pixels; j++) __builtin_prefetch(to + j * p.y_stride.w, 1);
      Vec<A> sum[pixels];
#pragma GCC unroll 16
      for (int j = 0; j < pixels; j++) sum[j] = A(0);
      const A *row = x + left * x_pixel, *weights = w;
      for (int64_t r = 0; r < rows; r++, row += x_row, weights += kGroupColumns * w_column) {
        Places<A> lane = own;
        for (int64_t c = 0; c < channels; c++, lane += 1) {
          Vec<A> taps[kGroupColumns];
#pragma GCC unroll 3
          for (int s = 0; s < kGroupColumns; s++) taps[s] = load(weights + s * w_column + c * width);
          const A* from = row + (joined ? 0 : c);
#pragma GCC unroll 32
          for (int i = 0; i < reach; i++, from += x_pixel) {
            // Padding is narrower than the kernel: no others can lie outside.
            if ((i < kGroupColumns - 1 && i < first) || (i > reach - kGroupColumns && i >= last)) continue;
            Vec<A> v;
            if constexpr (joined)
              v = __builtin_shuffle(load_some<whole>(from, lanes).raw, lane);
            else
              v = *from;
#pragma GCC unroll 3
            for (int s = i % stride; s < kGroupColumns; s += stride)
              if (i >= s && i - s <= (pixels - 1) * stride) sum[(i - s) / stride] = fma(v, taps[s], sum[(i - s) / stride]);
          }
        }
      }
#pragma GCC unroll 16
      for (int j = 0; j < pixels; j++)
        whole ? store(to + j * p.y_stride.w, sum[j] + bias) : store_partial(to + j * p.y_stride.w, sum[j] + bias, lanes);
    }
  }
  template <int pixels, int stride>
  void tiles() const {
    if (lanes < Vec<A>::width) return tiles<pixels, stride, true, false>();
    channels < Vec<A>::width ? tiles<pixels, stride, true, true>() : tiles<pixels, stride, false, true>();
  }
  template <int stride>
  void run() const {
    const bool many = p.out_width % kGroupPixels == 0 || p.out_width > 2 * kGroupPixels;
    many ? tiles<kGroupPixels, stride>() : tiles<kFewGroupPixels, stride>();
  }
};

// Weights [vector of groups][tap][channel][lane] of the convolution of dY that dX is: turned by 180 degrees, channels and filters
// of each group exchanged.
template <class T>
void pack_joined_turned(const Conv2dProblem& p, const T* w, Acc<T>* packed) {
  constexpr int64_t width = Vec<Acc<T>>::width;
  const int64_t channels = p.in_channels / p.groups, taps = p.kernel_height * p.kernel_width;
  for (int64_t first = 0; first < p.in_channels; first += width)
    for (int64_t tap = taps - 1; tap >= 0; tap--)
      for (int64_t c = 0; c < channels; c++)
        for (int64_t lane = 0; lane < width; lane++)
          *packed++ = widen(w[((first + lane - lane % channels + c) * channels + lane % channels) * taps + tap]);
}

// dW of `channels` channels in each group. A task has a few taps of one vector of groups, and goes through the pixels row by row,
// which are far apart where there are many channels. The sums of a row are added to those of the rows before, in one order
// whatever the threads.
template <class T, int channels>
void joined_weight_gradient(const Conv2dProblem& p, const T* gy, const T* x, T* dw, T* db) {
  using A = Acc<T>;
  constexpr int64_t width = Vec<A>::width, kTaps = 5;  // of a task, at the most
  // Neighbouring pixels have sums of their own where there are few, lest each product wait for the one before.
  constexpr int kApart = channels > 8 ? 1 : 2;
  const int64_t taps = p.kernel_height * p.kernel_width, chunks = ceil_div(taps, kTaps), step = p.stride_w * p.x_stride.w;
  const Places<A> own = first_of_group<A>(channels);
  // The sum of dY times the channels of n pixels, added to `total`.
  auto add_row = [&](const T* grad, const T* pixel, int64_t n, Vec<A>* total) {
    Vec<A> sum[kApart][channels];
#pragma GCC unroll 16
    for (int c = 0; c < kApart * channels; c++) sum[c / channels][c % channels] = A(0);
    auto add = [&](int which) {
      const Vec<A> g = load(grad), in = load(pixel);
#pragma GCC unroll 16
      for (int c = 0; c < channels; c++)
        sum[which][c] =
            fma(channels == width ? Vec<A>(widen(pixel[c])) : Vec<A>(__builtin_shuffle(in.raw, own + c)), g, sum[which][c]);
      pixel += step, grad += p.y_stride.w;
    };
    for (; kApart == 2 && n > 1; n -= 2) add(0), add(kApart - 1);
    for (; n > 0; n--) add(0);
#pragma GCC unroll 16
    for (int c = 0; c < channels; c++) total[c] += kApart == 2 ? sum[0][c] + sum[kApart - 1][c] : sum[0][c];
  };
  parallel_for(p.threads, p.in_channels / width * chunks, [&](int64_t i, int) {
    const int64_t first = i / chunks * width;
    const Share mine = share(taps, chunks, i % chunks);
    const bool with_bias = db && mine.begin == 0;
    Vec<A> total[kTaps][channels], bias = A(0);
    for (auto& of_tap : total)
      for (auto& t : of_tap) t = A(0);
    for (int64_t line = 0; line < p.batch * p.out_height; line++) {
      const int64_t n = line / p.out_height, row = line % p.out_height;
      const T *image = x + n * p.x_stride.n + first, *grads = gy + n * p.y_stride.n + row * p.y_stride.h + first;
      for (int64_t tap = mine.begin; tap < mine.end; tap++) {
        const int64_t h = row * p.stride_h - p.pad_h + tap / p.kernel_width * p.dilation_h,
                      w = tap % p.kernel_width * p.dilation_w - p.pad_w;
        if (h < 0 || h >= p.in_height) continue;
        const Range seen = inside(w, p.stride_w, p.in_width, p.out_width);
        add_row(grads + seen.begin * p.y_stride.w, image + h * p.x_stride.h + (seen.begin * p.stride_w + w) * p.x_stride.w,
                seen.size(), total[tap - mine.begin]);
      }
      Vec<A> sum = A(0);
      for (int64_t j = 0; with_bias && j < p.out_width; j++) sum += load(grads + j * p.y_stride.w);
      bias += sum;
    }
    for (int lane = 0; lane < width; lane++) {
      for (int64_t tap = mine.begin; tap < mine.end; tap++)
        for (int c = 0; c < channels; c++)
          narrow(total[tap - mine.begin][c][lane], dw[((first + lane) * channels + c) * taps + tap]);
      if (with_bias) narrow(bias[lane], db[first + lane]);
    }
  });
}
template <class T, int channels = Vec<Acc<T>>::width>
void joined_weight_gradient_of(int64_t group, const Conv2dProblem& p, const T* gy, const T* x, T* dw, T* db) {
  if (group == channels)
    joined_weight_gradient<T, channels>(p, gy, x, dw, db);
  else if constexpr (channels > 1)
    joined_weight_gradient_of<T, channels / 2>(group, p, gy, x, dw, db);
}

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

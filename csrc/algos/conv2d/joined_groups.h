// Groups with as many channels as filters, which fill a vector exactly: one of them, or neighbours together. Then lane l of a
// pixel's channels belongs to the group of filter l, and gradients need no panel for each group. NHWC.
#pragma once
#include "../core/lanes.h"
#include "problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

// Of a vector of the accumulator's type.
AI3_INLINE int64_t lanes_of(const Conv2dProblem& p) { return AI3_VECTOR_BYTES / (p.dtype == DType::f64 ? 8 : 4); }
// Whether they do. Without AVX2 no instruction brings any lane to any other.
AI3_INLINE bool groups_fill_vectors(const Conv2dProblem& p) {
  const int64_t lanes = lanes_of(p), filters = p.out_channels / p.groups;
  return AI3_VECTOR_BYTES > 16 && p.groups > 1 && p.in_channels == p.out_channels && filters > 0 && lanes % filters == 0 &&
         p.groups % (lanes / filters) == 0;
}
// How many of them are computed as one; 1 also where there are none.
AI3_INLINE int64_t joined_groups(const Conv2dProblem& p) {
  return groups_fill_vectors(p) ? lanes_of(p) / (p.out_channels / p.groups) : 1;
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

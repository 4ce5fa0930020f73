// Scalar-matrix multiplication convolution (Ofir & Ben-Artzi 2022): each scalar of the kernel scales a shifted plane of the
// input, which is added to the plane of the output; nothing is packed, padded or copied. Here the planes are taken by segments of
// a row, a few vectors for a few output channels, which stay in registers while all kernel scalars and input channels are added,
// so that partial sums are never rounded to the stored type. Lanes that a shift moves out of the image are left as they are.
#include "../core/lanes.h"
#include "backward.h"
#include "problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

constexpr int kPlanes = AI3_VECTOR_BYTES == 64 ? 8 : 4;  // output channels of a segment
constexpr int kVectors = 3;                              // vectors of a segment

// Input channels by rows of the kernel, one of its columns: x and w are that of the first channel and row.
template <class T>
struct Taps {
  const T *x, *w;
  int64_t channels, rows, x_channel, x_row, x_column, w_plane, w_channel, w_row;
};
// sum += taps; `whole`: every lane of every vector sees the image, otherwise those of `columns` do.
template <bool whole, class T, int planes, int vectors>
AI3_INLINE void add_taps(const Taps<T>& t, Range columns, Vec<Acc<T>> (&sum)[planes][vectors]) {
  using V = Vec<Acc<T>>;
  constexpr int width = V::width;
  Range lanes[vectors];
#pragma GCC unroll 8
  for (int q = 0; q < vectors; q++) lanes[q] = part_of(columns, q * width, width);
  for (int64_t c = 0; c < t.channels; c++) {
    const T* from = t.x + c * t.x_channel;
    Apart<const T, planes> scalars(t.w + c * t.w_channel, t.w_plane);
    for (int64_t r = 0; r < t.rows; r++, from += t.x_row, scalars += t.w_row) {
      auto row = [&](int q) { return from + q * width * t.x_column; };
      if constexpr (whole) {
        V v[vectors];
#pragma GCC unroll 8
        for (int q = 0; q < vectors; q++) v[q] = load_strided(row(q), t.x_column);
#pragma GCC unroll 8
        for (int k = 0; k < planes; k++) {
          const V scale = widen(*scalars[k]);
#pragma GCC unroll 8
          for (int q = 0; q < vectors; q++) sum[k][q] = fma(v[q], scale, sum[k][q]);
        }
      } else {
#pragma GCC unroll 8
        for (int q = 0; q < vectors; q++) {
          if (lanes[q].size() == width) {
            const V v = load_strided(row(q), t.x_column);
#pragma GCC unroll 8
            for (int k = 0; k < planes; k++) sum[k][q] = fma(v, V(widen(*scalars[k])), sum[k][q]);
          } else if (lanes[q].size() > 0) {
            const V v = load_strided(row(q), t.x_column, lanes[q]);
#pragma GCC unroll 8
            for (int k = 0; k < planes; k++) sum[k][q] = select(lanes[q], fma(v, V(widen(*scalars[k])), sum[k][q]), sum[k][q]);
          }
        }
      }
    }
  }
}

// Columns [column, column + count) of one row of `planes` output planes.
template <class T, int planes, int vectors>
void segment(const Conv2dProblem& p, const T* x, const T* w, const T* bias, T* y, int64_t row, int64_t column, int64_t count) {
  using A = Acc<T>;
  constexpr int width = Vec<A>::width;
  const int64_t channels = p.in_channels / p.groups, window = p.kernel_height * p.kernel_width;
  const int64_t top = row * p.stride_h - p.pad_h, left = column * p.stride_w - p.pad_w;
  const Range rows = inside(top, p.dilation_h, p.in_height, p.kernel_height);
  Vec<A> sum[planes][vectors];
#pragma GCC unroll 8
  for (int k = 0; k < planes; k++)
#pragma GCC unroll 8
    for (int q = 0; q < vectors; q++) sum[k][q] = A(0);
  for (int64_t s = 0; s < p.kernel_width && rows.size() > 0; s++) {
    const int64_t first = left + s * p.dilation_w;
    const Range columns = inside(first, p.stride_w, p.in_width, count);
    const Taps<T> taps{x + (top + rows.begin * p.dilation_h) * p.x_stride.h + first,
                       w + rows.begin * p.kernel_width + s,
                       channels,
                       rows.size(),
                       p.x_stride.c,
                       p.dilation_h * p.x_stride.h,
                       p.stride_w,
                       channels * window,
                       window,
                       p.kernel_width};
    columns.size() == vectors* width ? add_taps<true>(taps, columns, sum) : add_taps<false>(taps, columns, sum);
  }
#pragma GCC unroll 8
  for (int k = 0; k < planes; k++) {
    // Last: each product that was added to it would round at its size.
    const Vec<A> last = bias ? widen(bias[k]) : A(0);
#pragma GCC unroll 8
    for (int q = 0; q < vectors; q++) {
      const int64_t rest = count - q * width;
      T* to = y + k * p.y_stride.c + row * p.y_stride.h + column + q * width;
      rest < width ? store_partial(to, sum[k][q] + last, rest) : store(to, sum[k][q] + last);
    }
  }
}

// Segments of about equal length; the last one moves back over columns that are done, where it can be whole then.
template <class T, int planes>
void rows_of(const Conv2dProblem& p, const T* x, const T* w, const T* bias, T* y, int64_t row) {
  constexpr int64_t width = Vec<Acc<T>>::width;
  for (int64_t column = 0, count; column < p.out_width; column += count) {
    const int64_t rest = p.out_width - column, left = ceil_div(rest, width), length = ceil_div(left, ceil_div(left, kVectors));
    count = smaller(p.out_width, length * width);
    const int64_t first = smaller(column, p.out_width - count);
    switch (length) {
      case 1: segment<T, planes, 1>(p, x, w, bias, y, row, first, count); break;
      case 2: segment<T, planes, 2>(p, x, w, bias, y, row, first, count); break;
      default: segment<T, planes, kVectors>(p, x, w, bias, y, row, first, count);
    }
  }
}

template <class T>
void conv2d_smm(const Conv2dProblem& p, const T* x, const T* w, const T* bias, T* y, Workspace&) {
  const int64_t channels = p.in_channels / p.groups, planes = p.out_channels / p.groups;
  const int64_t blocks = ceil_div(planes, kPlanes), scalars = channels * p.kernel_height * p.kernel_width;
  // Output rows outside, channels inside: the input rows of one output row stay in the cache.
  const int64_t rows = checked_product({p.batch, p.groups, p.out_height, blocks});
  parallel_ranges(p.threads, rows, ceil_div(1 << 16, scalars * p.out_width), [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t block = i % blocks, row = i / blocks % p.out_height, g = i / blocks / p.out_height % p.groups;
      const int64_t n = i / blocks / p.out_height / p.groups, k0 = g * planes + block * kPlanes,
                    count = smaller(kPlanes, planes - block * kPlanes);
      const T* from = x + n * p.x_stride.n + g * channels * p.x_stride.c;
      T* to = y + n * p.y_stride.n + k0 * p.y_stride.c;
      if (count == kPlanes)
        rows_of<T, kPlanes>(p, from, w + k0 * scalars, bias ? bias + k0 : nullptr, to, row);
      else
        for (int64_t k = 0; k < count; k++)
          rows_of<T, 1>(p, from, w + (k0 + k) * scalars, bias ? bias + k0 + k : nullptr, to + k * p.y_stride.c, row);
    }
  });
}

Cost cost(const Conv2dProblem& p) {
  const int64_t width = AI3_VECTOR_BYTES / (p.dtype == DType::f64 ? 8 : 4);
  const double rows = static_cast<double>(p.batch * p.out_channels) * static_cast<double>(p.out_height);
  const double scalars = static_cast<double>(p.in_channels / p.groups * p.kernel_height * p.kernel_width);
  const double image =
      static_cast<double>(p.batch * p.in_channels) * static_cast<double>(p.in_height) * static_cast<double>(p.in_width);
  const double moved = image + rows * static_cast<double>(p.out_width) + scalars * static_cast<double>(p.out_channels);
  // Strided columns are collected one by one.
  return {2 * rows * static_cast<double>(round_up(p.out_width, width)) * scalars, moved * static_cast<double>(size_of(p.dtype)),
          p.stride_w <= 2 ? .5 : .1};
}

AI3_ALGORITHM(conv2d, smm, .layout = Layout::nchw, .cost = cost, .gradients = by_patches)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

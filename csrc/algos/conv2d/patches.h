// What convolutions by matrix product share: the packed weight, patches as rows or as panels of a matrix, and the product of a
// share. Patches and weights have their depth k in the order (r, s, c), which makes runs of an NHWC input contiguous.
//   y in NHWC (y_stride.c == 1): rows are the pixels of all images, columns the group's output channels;
//   y in NCHW: rows are the output channels, columns the pixels of one image, in panels that never cross images.
#pragma once
#include "../core/grid.h"
#include "../core/instances.h"
#include "../core/prologue.h"
#include "problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

struct ConvShape {
  int64_t channels, filters;  // of one group
  int64_t taps, depth, pixels;
  int64_t rows;  // pixels of all images
  bool as_rows;  // pixels are rows
  explicit ConvShape(const Conv2dProblem& p)
      : channels(p.in_channels / p.groups),
        filters(p.out_channels / p.groups),
        taps(p.kernel_height * p.kernel_width),
        depth(channels * taps),
        pixels(p.out_height * p.out_width),
        rows(p.batch * pixels),
        as_rows(p.y_stride.c == 1) {}
};
// Sizes are known and none is 0: there is something to compute.
AI3_INLINE bool is_concrete(const Conv2dProblem& p) { return p.batch > 0 && p.out_height > 0 && p.out_width > 0; }

inline int64_t packed_weight_bytes(const Conv2dProblem& p) {
  return with_type(p.dtype, [&]<class T>() {
    const int64_t depth = checked_product({p.in_channels / p.groups, p.kernel_height, p.kernel_width});
    return workspace_bytes<Acc<T>>(checked_mul(p.groups, packed_size<Acc<T>>(depth, p.out_channels / p.groups)));
  });
}
// Into [group][panel of filters][r][s][c][kPanel].
inline void pack_weight(const Conv2dProblem& p, const void* weight, void* packed) {
  with_type(p.dtype, [&]<class T>() {
    constexpr int64_t P = kPanel<Acc<T>>;
    const ConvShape s(p);
    const int64_t panels = panel_count<Acc<T>>(s.filters);
    parallel_for(p.threads, p.groups * panels, [&](int64_t i, int) {
      const int64_t filter = i % panels * P, rest = s.filters - filter;
      const T* w = static_cast<const T*>(weight) + (i / panels * s.filters + filter) * s.depth;
      Acc<T>* to = static_cast<Acc<T>*>(packed) + i * s.depth * P;
      constexpr int64_t kChannels = 16;  // whose weights stay in the L1 cache for all taps
      for (int64_t c = 0; c < s.channels; c += kChannels)
        for (int64_t t = 0; t < s.taps; t++)
          pack_panels(w + c * s.taps + t, smaller(kChannels, s.channels - c), smaller(rest, P), s.taps, s.depth,
                      to + (t * s.channels + c) * P, s.depth * P);
    });
  });
}
template <class T>
AI3_INLINE const Acc<T>* packed_group(const Conv2dOperands& m, const ConvShape& s, int64_t group) {
  return m.weight.read<Acc<T>>() + group * packed_size<Acc<T>>(s.depth, s.filters);
}

template <class A>
AI3_INLINE void clear(A* to, int64_t count) {
  for (int64_t i = 0; i < count; i++) to[i] = 0;
}

// The patches of pixels `rows`, numbered through all images, one row of `depth` elements each.
template <class T>
void gather_rows(const Conv2dProblem& p, const ConvShape& s, const Conv2dOperands& m, int64_t group, Share rows, Acc<T>* to,
                 int64_t stride) {
  const Prologue<Acc<T>> prologue = Prologue<Acc<T>>(p, m).from(group * s.channels);
  // Taps side by side are contiguous, and treated alike.
  const bool runs = p.x_stride.c == 1 && p.x_stride.w == s.channels && p.dilation_w == 1 && !prologue;
  const int64_t run = p.kernel_width * s.channels;
  for (int64_t i = rows.begin; i < rows.end; i++, to += stride) {
    const int64_t pixel = i % s.pixels, h0 = pixel / p.out_width * p.stride_h - p.pad_h,
                  w0 = pixel % p.out_width * p.stride_w - p.pad_w;
    const Range taps = inside(w0, p.dilation_w, p.in_width, p.kernel_width);
    const T* from = m.input.read<T>() + i / s.pixels * p.x_stride.n + group * s.channels * p.x_stride.c;
    for (int64_t r = 0; r < p.kernel_height; r++) {
      const int64_t h = h0 + r * p.dilation_h;
      Acc<T>* row = to + r * run;
      if (h < 0 || h >= p.in_height || taps.begin == taps.end) {
        clear(row, run);
        continue;
      }
      clear(row, taps.begin * s.channels);
      if (runs) {
        copy_widened(from + h * p.x_stride.h + (w0 + taps.begin) * p.x_stride.w, (taps.end - taps.begin) * s.channels,
                     row + taps.begin * s.channels);
      } else {
        for (int64_t t = taps.begin; t < taps.end; t++) {
          const T* source = from + h * p.x_stride.h + (w0 + t * p.dilation_w) * p.x_stride.w;
          if (p.x_stride.c == 1)
            copy_channels(prologue, source, s.channels, row + t * s.channels);
          else
            for (int64_t c = 0; c < s.channels; c++) row[t * s.channels + c] = prologue.from(c)(widen(source[c * p.x_stride.c]));
        }
      }
      clear(row + taps.end * s.channels, (p.kernel_width - taps.end) * s.channels);
    }
  }
}

// The patches as panels [panel][depth][kPanel]; panel q holds pixels of image q / panels_per_image.
template <class T>
void gather_panels(const Conv2dProblem& p, const ConvShape& s, const Conv2dOperands& m, int64_t group, Share panels, Acc<T>* to) {
  constexpr int64_t P = kPanel<Acc<T>>;
  const Prologue<Acc<T>> prologue = Prologue<Acc<T>>(p, m).from(group * s.channels);
  const int64_t per_image = panel_count<Acc<T>>(s.pixels), step = p.stride_w * p.x_stride.w;
  for (int64_t q = panels.begin; q < panels.end; q++, to += s.depth * P) {
    const int64_t first = q % per_image * P, count = s.pixels - first < P ? s.pixels - first : P;
    const T* image = m.input.read<T>() + q / per_image * p.x_stride.n + group * s.channels * p.x_stride.c;
    // One run of pixels in one output row at a time.
    for (int64_t done = 0, n; done < count; done += n) {
      const int64_t oh = (first + done) / p.out_width, ow = (first + done) % p.out_width;
      n = p.out_width - ow < count - done ? p.out_width - ow : count - done;
      for (int64_t t = 0; t < s.taps; t++) {
        const int64_t h = oh * p.stride_h - p.pad_h + t / p.kernel_width * p.dilation_h;
        const int64_t w = ow * p.stride_w - p.pad_w + t % p.kernel_width * p.dilation_w;
        const Range in = h < 0 || h >= p.in_height ? Range{n, n} : inside(w, p.stride_w, p.in_width, n);
        const T* from = image + h * p.x_stride.h + (w + in.begin * p.stride_w) * p.x_stride.w;
        Acc<T>* row = to + t * s.channels * P + done;
        for (int64_t c = 0; c < s.channels; c++, from += p.x_stride.c, row += P) {
          clear(row, in.begin);
          if (step == 1)
            copy_pixels(prologue.from(c), from, in.end - in.begin, row + in.begin);
          else
            for (int64_t i = in.begin; i < in.end; i++) row[i] = prologue.from(c)(widen(from[(i - in.begin) * step]));
          clear(row + in.end, n - in.end);
        }
      }
    }
    if (count < P)
      for (int64_t k = 0; k < s.depth; k++) clear(to + k * P + count, P - count);
  }
}

template <class T>
AI3_INLINE Output<T> output_of(const Conv2dProblem& p, const Conv2dOperands& m, int64_t shift, int64_t filter) {
  Output<T> y{m.output.write<T>() + shift, 0};
  y.set_epilogue(p.activation, m);
  if (y.bias) y.bias += filter;
  if (y.slope) y.slope += filter;
  if (y.residual) y.residual += shift;
  return y;
}
// Output channels of a group by pixels of all images (NHWC).
template <class T>
AI3_INLINE Output<T> pixel_rows(const Conv2dProblem& p, const ConvShape& s, const Conv2dOperands& m, int64_t group) {
  Output<T> y = output_of<T>(p, m, group * s.filters, group * s.filters);
  y.row_stride = s.pixels == 1 ? p.y_stride.n : p.y_stride.w;
  return y;
}
// Pixels of one image as columns (NCHW).
template <class T>
AI3_INLINE Output<T> filter_rows(const Conv2dProblem& p, const ConvShape& s, const Conv2dOperands& m, int64_t image,
                                 int64_t group) {
  Output<T> y = output_of<T>(p, m, image * p.y_stride.n + group * s.filters * p.y_stride.c, group * s.filters);
  y.row_stride = p.y_stride.c, y.bias_per_row = true;
  return y;
}

// The product of gathered rows with some filters.
template <class T>
void multiply_rows(const Conv2dProblem& p, const ConvShape& s, const Conv2dOperands& m, int64_t group, Share rows,
                   const Acc<T>* patches, int64_t stride, Share filters) {
  gemm_block<T>(StridedRows<Acc<T>>{patches, stride}, rows.end - rows.begin,
                packed_group<T>(m, s, group) + filters.begin * s.depth, filters.end - filters.begin, s.depth,
                pixel_rows<T>(p, s, m, group).from(rows.begin, filters.begin));
}
// The product of some filters with gathered panels.
template <class T>
void multiply_panels(const Conv2dProblem& p, const ConvShape& s, const Conv2dOperands& m, int64_t group, Share panels,
                     const Acc<T>* patches, Share filters) {
  constexpr int64_t P = kPanel<Acc<T>>;
  const int64_t per_image = panel_count<Acc<T>>(s.pixels);
  for (int64_t q = panels.begin, n; q < panels.end; q += n) {
    const int64_t image = q / per_image, first = q % per_image * P;
    n = (image + 1) * per_image < panels.end ? (image + 1) * per_image - q : panels.end - q;
    const int64_t count = first + n * P < s.pixels ? n * P : s.pixels - first;
    gemm_block<T>(PanelRows<Acc<T>>{packed_group<T>(m, s, group) + filters.begin * s.depth}, filters.end - filters.begin,
                  patches + (q - panels.begin) * s.depth * P, count, s.depth,
                  filter_rows<T>(p, s, m, image, group).from(filters.begin, first));
  }
}

// Units of patches: slabs of rows or panels, over all images.
template <class T>
struct PatchUnits {
  int64_t count, size;  // size: pixels of a unit
  int64_t stride;       // elements from one pixel row to the next
  PatchUnits(const Conv2dProblem& p, const ConvShape& s)
      : count(s.as_rows ? ceil_div(s.rows, kRows) : p.batch * panel_count<Acc<T>>(s.pixels)),
        size(s.as_rows ? kRows : kPanel<Acc<T>>),
        stride(s.as_rows ? prepared_stride<Acc<T>>(s.depth) : s.depth) {}
};

// Pixels of one image as rows, in either layout.
template <class T>
AI3_INLINE Output<T> image_rows(const Conv2dProblem& p, const ConvShape& s, const Conv2dOperands& m, int64_t image,
                                int64_t group) {
  Output<T> y = output_of<T>(p, m, image * p.y_stride.n + group * s.filters * p.y_stride.c, group * s.filters);
  y.row_stride = p.y_stride.w, y.column_stride = p.y_stride.c;
  return y;
}

// Elements of the copy of x that methods need which read it in NHWC and in the accumulator's type; 0 where x is that already.
template <class T>
int64_t nhwc_copy_size(const Conv2dProblem& p) {
  const bool same = sizeof(T) == sizeof(Acc<T>) && (p.x_stride.c == 1 || p.in_channels == 1);
  return same ? 0 : checked_product({p.batch, p.in_height, p.in_width, p.in_channels});
}
// Such an input.
template <class T>
struct NhwcInput {
  const Acc<T>* data;
  Strides4 stride;

  NhwcInput(const Conv2dProblem& p, const T* x, Workspace& workspace) : stride(p.x_stride) {
    const int64_t size = nhwc_copy_size<T>(p), channels = p.in_channels, width = p.in_width;
    if constexpr (sizeof(T) == sizeof(Acc<T>)) data = x;
    if (size == 0) return;
    Acc<T>* copy = workspace.take<Acc<T>>(size);
    parallel_for(p.threads, p.batch * p.in_height, [&](int64_t i, int) {
      const T* from = x + i / p.in_height * p.x_stride.n + i % p.in_height * p.x_stride.h;
      Acc<T>* to = copy + i * width * channels;
      if (p.x_stride.c == 1 && p.x_stride.w == channels) return copy_widened(from, width * channels, to);
      constexpr int64_t kLine = 16;  // channels at a time: whole cache lines are written
      for (int64_t c0 = 0; c0 < channels; c0 += kLine) {
        const int64_t end = c0 + kLine < channels ? c0 + kLine : channels;
        for (int64_t w = 0; w < width; w++)
          for (int64_t c = c0; c < end; c++) to[w * channels + c] = widen(from[c * p.x_stride.c + w * p.x_stride.w]);
      }
    });
    data = copy, stride = {p.in_height * width * channels, 1, width * channels, channels};
  }
};

AI3_INLINE Cost gemm_cost(const Conv2dProblem& p, double patch_copies, double efficiency) {
  const ConvShape s(p);
  const double n = static_cast<double>(s.rows), k = static_cast<double>(s.depth), size = static_cast<double>(size_of(p.dtype));
  const double in = static_cast<double>(p.batch * p.in_channels) * static_cast<double>(p.in_height * p.in_width);
  const double filters = static_cast<double>(p.out_channels);
  const int64_t panel = with_type(p.dtype, []<class T>() { return int64_t{kPanel<Acc<T>>}; });
  const double columns = static_cast<double>(p.groups * round_up(s.filters, panel));  // each group's last panel is padded
  return {2 * n * k * columns,
          size * (in + n * filters) + 4 * k * columns + patch_copies * 4 * n * k * static_cast<double>(p.groups), efficiency};
}

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

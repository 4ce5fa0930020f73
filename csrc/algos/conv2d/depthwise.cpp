// Depthwise convolution: every group has one input channel, so that nothing is summed over channels and memory decides. NHWC:
// lanes are channels; a few neighbouring output pixels stay in registers over the window, and each vector of weights serves all
// of them. NCHW: lanes are neighbouring columns of a plane. Weights are read as [multiplier][R][S][C], where channels are
// contiguous.
#include "../core/algorithm.h"
#include "../core/epilogue.h"
#include "../core/lanes.h"

namespace ai3::inline AI3_LEVEL {
namespace {

constexpr int kPixels = 7;     // NHWC: pixels of a register tile; the maps of many networks are multiples of 7 wide
constexpr int kFewPixels = 4;  // of a tile for the rest of a row
constexpr int kHeight = AI3_VECTOR_BYTES == 64 ? 2 : 1;  // its rows: 14 sums, 14 weights of a 7x7 kernel, one input
constexpr int kVectors = 4;                              // NCHW: vectors of a row's segment

bool supports(const Conv2dProblem& p, Reason& reason) {
  if (p.groups == p.in_channels || p.groups < 0 || p.in_channels < 0) return true;
  return refuse(reason, "needs groups == in_channels, got groups %lld and %lld input channels", static_cast<long long>(p.groups),
                static_cast<long long>(p.in_channels));
}

int64_t packed_bytes(const Conv2dProblem& p) {
  return checked_product({p.out_channels, p.kernel_height, p.kernel_width, p.dtype == DType::f64 ? 8 : 4});
}
void pack(const Conv2dProblem& p, const void* weight, void* packed) {
  const int64_t window = p.kernel_height * p.kernel_width, multiplier = p.out_channels / p.in_channels;
  with_type(p.dtype, [&]<class T>() {
    const T* w = static_cast<const T*>(weight);
    Acc<T>* out = static_cast<Acc<T>*>(packed);
    for (int64_t m = 0; m < multiplier; m++)
      for (int64_t rs = 0; rs < window; rs++)
        for (int64_t c = 0; c < p.in_channels; c++) *out++ = widen(w[(c * multiplier + m) * window + rs]);
  });
}

template <class T>
struct Call {
  const Conv2dProblem& p;
  const T *x, *bias, *residual;
  const Acc<T>* w;
  T* y;
  int64_t multiplier;

  // The first n lanes of v go to y[at], y[at + step], ...
  AI3_INLINE void put(int64_t at, int64_t step, int64_t n, Vec<Acc<T>> v) const {
    if (n == Vec<Acc<T>>::width && step == 1 && !residual && p.activation == Activation::none)
      store(y + at, v);
    else
      put_any(at, step, n, v);
  }
  [[gnu::noinline]] void put_any(int64_t at, int64_t step, int64_t n, Vec<Acc<T>> v) const {
    if (residual) v += load_strided(residual + at, step, {0, n});
    v = activate(p.activation, v);
    if (step != 1)
      for (int i = 0; i < n; i++) y[at + i * step] = narrowed<T>(v[i]);
    else
      n == Vec<Acc<T>>::width ? store(y + at, v) : store_partial(y + at, v, n);
  }
};

// NHWC: `height` rows of output, columns [tile, tiles_end), channels [begin, end): tiles of height x pixels outputs by a vector
// of channels stay in registers over the window. Where the kernel's columns and their stride are known, each input vector is
// loaded once for all outputs of the tile that see it; columns == 0 reads both from the problem, and any dilation.
template <class T, int height, int pixels, int columns, int stride>
void rows_of(const Call<T>& call, int64_t n, int64_t m, int64_t begin, int64_t end, int64_t row, int64_t tile,
             int64_t tiles_end) {
  using A = Acc<T>;
  constexpr int width = Vec<A>::width, reach = (pixels - 1) * stride + columns;
  const Conv2dProblem& p = call.p;
  const int64_t x_column = p.x_stride.w, top = row * p.stride_h - p.pad_h;
  const int64_t w_row = p.kernel_width * p.in_channels, multiplier = call.multiplier;
  const Range rows = inside(top, p.dilation_h, p.in_height, (height - 1) * p.stride_h + p.kernel_height);
  const A* panel = call.w + m * p.kernel_height * w_row;
  const bool plain = multiplier == 1 && !call.residual && p.activation == Activation::none;
  for (; tile < tiles_end; tile += pixels) {
    const int64_t column = smaller(tile, p.out_width - pixels);  // the row's last tile reaches back over the one before it
    const int64_t left = column * p.stride_w - p.pad_w;
    const T* image = call.x + n * p.x_stride.n + top * p.x_stride.h + left * x_column;
    const int64_t to = n * p.y_stride.n + row * p.y_stride.h + column * p.y_stride.w + m;
    const int first = static_cast<int>(smaller(reach, larger(0, -left))),
              last = static_cast<int>(larger(0, smaller(reach, p.in_width - left)));
    auto vector = [&]<bool whole>(int64_t c, int64_t lanes) {
      auto lanes_at = [&](const auto* from) { return whole ? load(from) : load_partial(from, lanes); };
      Vec<A> sum[height][pixels];
      const Vec<A> start = !call.bias        ? Vec<A>(A(0))
                           : multiplier == 1 ? lanes_at(call.bias + c)
                                             : load_strided(call.bias + c * multiplier + m, multiplier, {0, lanes});
#pragma GCC unroll 2
      for (int h = 0; h < height; h++)
#pragma GCC unroll 8
        for (int j = 0; j < pixels; j++) sum[h][j] = start;
      // Row r of the input below the tile's top serves the output rows [h0, h1).
      auto input_row = [&]<int h0, int h1>(int64_t r) {
        const T* from = image + r * p.dilation_h * p.x_stride.h + c;
        const A* w = panel + (r - h0 * p.stride_h) * w_row + c;
        if constexpr (columns > 0) {
          Vec<A> weights[height][columns];
#pragma GCC unroll 2
          for (int h = h0; h < h1; h++, w -= p.stride_h * w_row)
#pragma GCC unroll 8
            for (int s = 0; s < columns; s++) weights[h][s] = lanes_at(w + s * p.in_channels);
#pragma GCC unroll 32
          for (int i = 0; i < reach; i++) {
            if (i < first || i >= last) continue;
            const Vec<A> v = lanes_at(from + i * x_column);
#pragma GCC unroll 8
            for (int s = i % stride; s < columns; s += stride)
              if (i >= s && i - s <= (pixels - 1) * stride)
#pragma GCC unroll 2
                for (int h = h0; h < h1; h++) sum[h][(i - s) / stride] = fma(v, weights[h][s], sum[h][(i - s) / stride]);
          }
        } else {
          for (int64_t s = 0; s < p.kernel_width; s++, w += p.in_channels) {
            const Range seen = inside(left + s * p.dilation_w, p.stride_w, p.in_width, pixels);
            const Vec<A> weights = lanes_at(w);
#pragma GCC unroll 8
            for (int j = 0; j < pixels; j++)
              if (j >= seen.begin && j < seen.end)
                sum[h0][j] = fma(lanes_at(from + (s * p.dilation_w + j * p.stride_w) * x_column), weights, sum[h0][j]);
          }
        }
      };
      for (int64_t r = rows.begin; r < rows.end; r++) {
        if constexpr (height == 1) {
          input_row.template operator()<0, 1>(r);
        } else {
          const bool upper = r < p.kernel_height, lower = r >= p.stride_h;
          if (upper && lower)
            input_row.template operator()<0, 2>(r);
          else if (upper)
            input_row.template operator()<0, 1>(r);
          else if (lower)
            input_row.template operator()<1, 2>(r);
        }
      }
#pragma GCC unroll 2
      for (int h = 0; h < height; h++)
#pragma GCC unroll 8
        for (int j = 0; j < pixels; j++) {
          const int64_t at = to + h * p.y_stride.h + j * p.y_stride.w + c * multiplier;
          whole&& plain ? store(call.y + at, sum[h][j]) : call.put(at, multiplier, lanes, sum[h][j]);
        }
    };
    int64_t c = begin;
    for (; c + width <= end; c += width) vector.template operator()<true>(c, width);
    if (c < end) vector.template operator()<false>(c, end - c);
  }
}

template <class T>
using RowsOf = decltype(&rows_of<T, 1, 1, 0, 0>);
// The form with known columns and stride, if there is one.
template <class T, int height, int pixels>
RowsOf<T> form_for(const Conv2dProblem& p) {
  auto of_stride = [&]<int stride>() -> RowsOf<T> {
    if (p.kernel_width == 3) return rows_of<T, height, pixels, 3, stride>;
    if (p.kernel_width == 5) return rows_of<T, height, pixels, 5, stride>;
    if (p.kernel_width == 7) return rows_of<T, height, pixels, 7, stride>;
    return nullptr;
  };
  if (p.out_width < kFewPixels || p.dilation_h != 1 || p.dilation_w != 1 || p.stride_w > 2) return nullptr;
  return p.stride_w == 1 ? of_stride.template operator()<1>() : of_stride.template operator()<2>();
}

// NCHW: `count` columns of a row of one output plane, up to `vectors` vectors.
template <class T, int vectors>
AI3_INLINE void segment(const Call<T>& call, const T* plane, const Acc<T>* w, Acc<T> start, int64_t to, int64_t row,
                        int64_t column, int64_t count) {
  using A = Acc<T>;
  constexpr int width = Vec<A>::width;
  const Conv2dProblem& p = call.p;
  const int64_t top = row * p.stride_h - p.pad_h, left = column * p.stride_w - p.pad_w, step = p.stride_w * p.x_stride.w;
  const Range rows = inside(top, p.dilation_h, p.in_height, p.kernel_height);
  Vec<A> sum[vectors];
#pragma GCC unroll 4
  for (int q = 0; q < vectors; q++) sum[q] = start;
  for (int64_t s = 0; s < p.kernel_width; s++) {
    const int64_t at = left + s * p.dilation_w;
    const Range columns = inside(at, p.stride_w, p.in_width, count);
    for (int64_t r = rows.begin; r < rows.end; r++) {
      const Vec<A> scale = w[(r * p.kernel_width + s) * p.in_channels];
      const T* from = plane + (top + r * p.dilation_h) * p.x_stride.h + at * p.x_stride.w;
#pragma GCC unroll 4
      for (int q = 0; q < vectors; q++) {
        const Range lanes = part_of(columns, q * width, width);
        if (lanes.size() == width)
          sum[q] = fma(load_strided(from + q * width * step, step), scale, sum[q]);
        else if (lanes.size() > 0)
          sum[q] = select(lanes, fma(load_strided(from + q * width * step, step, lanes), scale, sum[q]), sum[q]);
      }
    }
  }
#pragma GCC unroll 4
  for (int q = 0; q < vectors; q++)
    if (q * width < count)
      call.put(to + row * p.y_stride.h + (column + q * width) * p.y_stride.w, p.y_stride.w, smaller(width, count - q * width),
               sum[q]);
}

template <class T>
void conv2d_depthwise(const Conv2dProblem& p, const Buffers& m, Workspace&) {
  constexpr int64_t width = Vec<Acc<T>>::width;
  const Call<T> call{p,
                     static_cast<const T*>(m.input),
                     static_cast<const T*>(m.bias),
                     static_cast<const T*>(m.residual),
                     static_cast<const Acc<T>*>(m.weight),
                     static_cast<T*>(m.output),
                     p.out_channels / p.in_channels};
  const int64_t window = p.kernel_height * p.kernel_width;
  const bool nhwc = p.x_stride.c == 1 && p.y_stride.c == 1;
  RowsOf<T> bands_form = form_for<T, kHeight, kPixels>(p), row_form = form_for<T, 1, kPixels>(p),
            rest_form = form_for<T, 1, kFewPixels>(p);
  const int64_t height = nhwc && bands_form ? kHeight : 1, bands = ceil_div(p.out_height, height);
  const int64_t rest = p.out_width % kPixels;
  const bool reach_back = bands_form && p.out_width > kPixels && rest > kFewPixels;
  const int64_t columns = reach_back ? p.out_width : p.out_width - rest;  // those of tiles of kPixels
  if (!bands_form) bands_form = row_form = rows_of<T, 1, kPixels, 0, 0>, rest_form = rows_of<T, 1, 1, 0, 0>;
  // NHWC: few rows are cut into blocks of channels, so that threads get equal shares.
  const int64_t planes = p.batch * (nhwc ? 1 : p.out_channels), vectors = ceil_div(p.in_channels, width);
  const int64_t blocks = nhwc ? smaller(vectors, ceil_div(16 * p.threads, larger(1, planes * bands))) : 1;
  const int64_t work = height * window * p.out_width * (nhwc ? p.out_channels / blocks : 1);
  parallel_ranges(p.threads, planes * bands * blocks, ceil_div(1 << 16, work), [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t row = i / blocks % bands * height, plane = i / blocks / bands;
      if (nhwc) {
        const int64_t block = i % blocks, first = vectors * block / blocks * width,
                      last = smaller(p.in_channels, vectors * (block + 1) / blocks * width);
        for (int64_t f = 0; f < call.multiplier; f++)
          if (row + height <= p.out_height) {
            bands_form(call, plane, f, first, last, row, 0, columns);
            for (int64_t h = 0; h < height; h++) rest_form(call, plane, f, first, last, row + h, columns, p.out_width);
          } else {
            row_form(call, plane, f, first, last, row, 0, columns);
            rest_form(call, plane, f, first, last, row, columns, p.out_width);
          }
      } else {
        const int64_t n = plane / p.out_channels, k = plane % p.out_channels, c = k / call.multiplier, f = k % call.multiplier;
        const T* from = call.x + n * p.x_stride.n + c * p.x_stride.c;
        const Acc<T>* w = call.w + f * window * p.in_channels + c;
        const Acc<T> start = call.bias ? widen(call.bias[k]) : Acc<T>(0);
        const int64_t to = n * p.y_stride.n + k * p.y_stride.c;
        int64_t column = 0;
        for (; p.out_width - column > width; column += smaller(kVectors * width, p.out_width - column))
          segment<T, kVectors>(call, from, w, start, to, row, column, smaller(kVectors * width, p.out_width - column));
        if (column < p.out_width) segment<T, 1>(call, from, w, start, to, row, column, p.out_width - column);
      }
    }
  });
}

Cost cost(const Conv2dProblem& p) {
  const double outputs =
      static_cast<double>(p.batch * p.out_channels) * static_cast<double>(p.out_height) * static_cast<double>(p.out_width);
  const double image =
      static_cast<double>(p.batch * p.in_channels) * static_cast<double>(p.in_height) * static_cast<double>(p.in_width);
  return {2 * outputs * static_cast<double>(p.kernel_height * p.kernel_width),
          (image + outputs) * static_cast<double>(size_of(p.dtype)), .3};
}

AI3_ALGORITHM(conv2d, depthwise, .epilogue = true, .supports = supports, .cost = cost, .packed_bytes = packed_bytes, .pack = pack,
              .sliced = true)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

// Depthwise convolution: every group has one input channel, so that nothing is summed over channels and memory decides. NHWC:
// lanes are channels; a few neighbouring output pixels stay in registers over the window, and each vector of weights serves all
// of them. NCHW: lanes are neighbouring columns of a plane. Weights are read as [multiplier][R][S][C], where channels are
// contiguous.
#include "../core/algorithm.h"
#include "../core/epilogue.h"
#include "../core/lanes.h"

namespace ai3::inline AI3_LEVEL {
namespace {

constexpr int kPixels = 8;   // NHWC: pixels of a register tile
constexpr int kVectors = 4;  // NCHW: vectors of a row's segment

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
    for (int i = 0; i < n; i++) y[at + i * step] = narrowed<T>(v[i]);
  }
};

// NHWC: `pixels` neighbouring outputs, one vector of `lanes` channels.
template <class T, int pixels, bool whole>
void tile(const Call<T>& call, const T* image, int64_t n, int64_t m, int64_t c, int64_t lanes, int64_t row, int64_t column) {
  using A = Acc<T>;
  const Conv2dProblem& p = call.p;
  auto lanes_at = [&](const auto* from) { return whole ? load(from) : load_partial(from, lanes); };
  const int64_t top = row * p.stride_h - p.pad_h, left = column * p.stride_w - p.pad_w;
  const Range rows = inside(top, p.dilation_h, p.in_height, p.kernel_height);
  Vec<A> sum[pixels];
  const Vec<A> start = call.bias ? load_strided(call.bias + c * call.multiplier + m, call.multiplier, {0, lanes}) : Vec<A>(A(0));
#pragma GCC unroll 8
  for (int j = 0; j < pixels; j++) sum[j] = start;
  const A* w = call.w + m * p.kernel_height * p.kernel_width * p.in_channels + c;
  for (int64_t r = rows.begin; r < rows.end; r++)
    for (int64_t s = 0; s < p.kernel_width; s++) {
      const int64_t at = left + s * p.dilation_w;
      const Range columns = inside(at, p.stride_w, p.in_width, pixels);
      const Vec<A> weights = lanes_at(w + (r * p.kernel_width + s) * p.in_channels);
      const T* from = image + (top + r * p.dilation_h) * p.x_stride.h + at * p.x_stride.w + c;
      if (columns.size() == pixels) {
#pragma GCC unroll 8
        for (int j = 0; j < pixels; j++) sum[j] = fma(lanes_at(from + j * p.stride_w * p.x_stride.w), weights, sum[j]);
      } else {
#pragma GCC unroll 8
        for (int j = 0; j < pixels; j++)
          if (j >= columns.begin && j < columns.end)
            sum[j] = fma(lanes_at(from + j * p.stride_w * p.x_stride.w), weights, sum[j]);
      }
    }
#pragma GCC unroll 8
  for (int j = 0; j < pixels; j++)
    call.put(n * p.y_stride.n + row * p.y_stride.h + (column + j) * p.y_stride.w + c * call.multiplier + m, call.multiplier,
             lanes, sum[j]);
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
  const int64_t planes = p.batch * (nhwc ? 1 : p.out_channels);
  const int64_t row_work = window * p.out_width * (nhwc ? p.out_channels : 1);
  parallel_ranges(p.threads, planes * p.out_height, ceil_div(1 << 16, row_work), [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t row = i % p.out_height, plane = i / p.out_height;
      if (nhwc) {
        const T* image = call.x + plane * p.x_stride.n;
        for (int64_t f = 0; f < call.multiplier; f++)
          for (int64_t c = 0; c < p.in_channels; c += width) {
            const int64_t lanes = smaller(width, p.in_channels - c);
            auto tiles = [&]<bool whole>() {
              int64_t column = 0;
              for (; column + kPixels <= p.out_width; column += kPixels)
                tile<T, kPixels, whole>(call, image, plane, f, c, lanes, row, column);
              for (; column < p.out_width; column++) tile<T, 1, whole>(call, image, plane, f, c, lanes, row, column);
            };
            lanes == width ? tiles.template operator()<true>() : tiles.template operator()<false>();
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

AI3_ALGORITHM(conv2d, depthwise, .epilogue = true, .supports = supports, .cost = cost, .packed_bytes = packed_bytes, .pack = pack)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

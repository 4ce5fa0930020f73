// Depthwise convolution: every group has one input channel, so that nothing is summed over channels and memory decides. NHWC:
// lanes are channels; a few neighbouring output pixels stay in registers over the window, and each vector of weights serves all
// of them. NCHW: lanes are neighbouring columns of a plane. Weights are read as [multiplier][R][S][C], where channels are
// contiguous.
#include <type_traits>

#include "../core/epilogue.h"
#include "../core/planes.h"
#include "backward.h"
#include "delegated.h"
#include "problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

constexpr int kPixels = 7;     // NHWC: pixels of a register tile; the maps of many networks are multiples of 7 wide
constexpr int kFewPixels = 4;  // of a tile for the rest of a row
constexpr int kHeight = AI3_VECTOR_BYTES == 64 ? 2 : 1;  // its rows: 14 sums, 14 weights of a 7x7 kernel, one input
constexpr int kVectors = 4;                              // NCHW: vectors of a row's segment
constexpr int64_t kCached = 16 << 20;                    // bytes of input and output that caches may hold from call to call
// Types with a form for each activation, and with tiles of kHeight rows; the others are rare, as are processors without AVX2 and
// bfloat16 on those without AVX-512.
template <class T>
constexpr bool kIsCommon = (std::is_same_v<T, float> && AI3_VECTOR_BYTES >= 32) ||
                           (std::is_same_v<T, bfloat16> && AI3_VECTOR_BYTES == 64);
// Types with forms of known columns: without AVX2 what unrolls is the conversion of each element of 16 bits.
template <class T>
constexpr bool kIsUnrolled = sizeof(T) > 2 || AI3_VECTOR_BYTES >= 32;
template <class T>
constexpr int kHeightOf = kIsCommon<T> ? kHeight : 1;

bool supports(const Conv2dProblem& p, Reason& reason) {
  if (p.groups == p.in_channels || p.groups < 0 || p.in_channels < 0) return true;
  return refuse(reason, "needs groups == in_channels, got groups %lld and %lld input channels", static_cast<long long>(p.groups),
                static_cast<long long>(p.in_channels));
}

double outputs(const Conv2dProblem& p) {
  return static_cast<double>(p.batch * p.out_channels) * static_cast<double>(p.out_height) * static_cast<double>(p.out_width);
}
// Of input and output.
double bytes(const Conv2dProblem& p) {
  const double image =
      static_cast<double>(p.batch * p.in_channels) * static_cast<double>(p.in_height) * static_cast<double>(p.in_width);
  return (image + outputs(p)) * static_cast<double>(size_of(p.dtype));
}

int64_t packed_bytes(const Conv2dProblem& p) {
  return checked_product({p.out_channels, p.kernel_height, p.kernel_width, p.dtype == DType::f64 ? 8 : 4});
}
// Turned by 180 degrees for the gradient of the input.
template <class T>
void pack_taps(const Conv2dProblem& p, const T* w, bool turned, Acc<T>* out) {
  const int64_t window = p.kernel_height * p.kernel_width, multiplier = p.out_channels / p.in_channels;
  for (int64_t m = 0; m < multiplier; m++)
    for (int64_t rs = 0; rs < window; rs++)
      for (int64_t c = 0; c < p.in_channels; c++)
        *out++ = widen(w[(c * multiplier + m) * window + (turned ? window - 1 - rs : rs)]);
}
void pack(const Conv2dProblem& p, const void* weight, void* packed) {
  with_type(p.dtype, [&]<class T>() { pack_taps(p, static_cast<const T*>(weight), false, static_cast<Acc<T>*>(packed)); });
}

template <class T>
struct Call {
  const Conv2dProblem& p;
  const T *x, *bias, *residual;
  const Acc<T>* w;
  T* y;
  int64_t multiplier;
  bool from_memory;  // input and output are larger than the caches
  const Acc<T>* slope;
  bool called;  // is_called(p.activation)

  // The first n lanes of v go to y[at], y[at + step], ...; they are one channel's.
  AI3_INLINE void put(int64_t at, int64_t step, int64_t n, Vec<Acc<T>> v, int64_t channel) const {
    if (n == Vec<Acc<T>>::width && step == 1 && !residual && p.activation == Activation::none)
      store(y + at, v);
    else if (called) [[unlikely]]  // a call inside put_any would make it slower for the others
      put_called(at, step, n, v, channel, 0);
    else
      put_any(at, step, n, v);
  }
  // To y[at], y[at + 1], ..., all of v.
  AI3_INLINE void put_whole(int64_t at, Vec<Acc<T>> v) const {
    if (residual) v += load(residual + at);
    store(y + at, activate_inline(p.activation, v));
  }
  [[gnu::noinline]] void put_any(int64_t at, int64_t step, int64_t n, Vec<Acc<T>> v) const {
    if (residual) v += load_strided(residual + at, step, {0, n});
    put_lanes(at, step, n, activate_inline(p.activation, v));
  }
  // Lane i is of channel + i * channel_step.
  [[gnu::noinline]] void put_called(int64_t at, int64_t step, int64_t n, Vec<Acc<T>> v, int64_t channel,
                                    int64_t channel_step) const {
    if (residual) v += load_strided(residual + at, step, {0, n});
    v = activate_stored<true>(p.activation, v, [&] { return load_strided(slope + channel, channel_step, {0, n}); });
    put_lanes(at, step, n, v);
  }
  AI3_INLINE void put_lanes(int64_t at, int64_t step, int64_t n, Vec<Acc<T>> v) const {
    if (step != 1)
      for (int i = 0; i < n; i++) y[at + i * step] = narrowed<T>(v[i]);
    else
      n == Vec<Acc<T>>::width ? store(y + at, v) : store_partial(y + at, v, n);
  }
};

// What is done with the sums, each in code of its own: beside that of another, GCC would spill some of them. `bounded` is relu
// and relu6, `any` every activation, residual and multiplier.
enum class Fused { nothing, bounded, hardswish, silu, any };
template <class T>
Fused fused_of(const Call<T>& call) {
  if (call.multiplier > 1 || call.residual) return Fused::any;
  switch (call.p.activation) {
    case Activation::none: return Fused::nothing;
    case Activation::relu:
    case Activation::relu6: return Fused::bounded;
    case Activation::hardswish: return Fused::hardswish;
    case Activation::silu: return Fused::silu;
    default: return Fused::any;
  }
}

// NHWC: `count` rows of output, `height` at most, columns [tile, tiles_end), channels [begin, end): tiles of height x pixels
// outputs by a vector of channels stay in registers over the window. Where the kernel's columns and their stride are known, each
// input vector is loaded once for all outputs of the tile that see it; columns == 0 reads both from the problem, and any
// dilation. The last vector of channels has less lanes or, in forms of one activation, reaches back over the one before it.
template <class T, int height, int pixels, int columns, int stride, Fused fused>
void rows_of(const Call<T>& call, int64_t n, int64_t m, int64_t begin, int64_t end, int64_t row, int64_t count, int64_t tile,
             int64_t tiles_end) {
  using A = Acc<T>;
  constexpr int width = Vec<A>::width, reach = (pixels - 1) * stride + columns;
  const Conv2dProblem& p = call.p;
  const int64_t x_column = p.x_stride.w, top = row * p.stride_h - p.pad_h;
  const int64_t w_row = p.kernel_width * p.in_channels, multiplier = fused == Fused::any ? call.multiplier : 1;
  const Range rows = inside(top, p.dilation_h, p.in_height, (count - 1) * p.stride_h + p.kernel_height);
  const A* panel = call.w + m * p.kernel_height * w_row;
  const Vec<A> most = p.activation == Activation::relu6 ? A(6) : static_cast<A>(__builtin_inf());  // of Fused::bounded
  for (; tile < tiles_end; tile += pixels) {
    const int64_t column = smaller(tile, p.out_width - pixels);  // the row's last tile reaches back over the one before it
    const int64_t left = column * p.stride_w - p.pad_w;
    const T* image = call.x + n * p.x_stride.n + top * p.x_stride.h + left * x_column;
    const int64_t to = n * p.y_stride.n + row * p.y_stride.h + column * p.y_stride.w + m;
    const int first = static_cast<int>(smaller(reach, larger(0, -left))),
              last = static_cast<int>(larger(0, smaller(reach, p.in_width - left)));
    // From memory, the rows that the tile below adds are prefetched here, and the lines that it writes.
    const bool ahead = columns > 0 && call.from_memory && row + 2 * height <= p.out_height;
    const T* below = image + ((height - 1) * p.stride_h + p.kernel_height) * p.x_stride.h;
    auto vector = [&]<bool whole>(int64_t c, int64_t lanes) {
      if (ahead) {
        for (int64_t h = 0; h < height * p.stride_h; h++)
#pragma GCC unroll 16
          for (int i = 0; i < pixels * stride; i++) __builtin_prefetch(below + h * p.x_stride.h + i * x_column + c, 0, 2);
#pragma GCC unroll 2
        for (int h = height; h < 2 * height; h++)
#pragma GCC unroll 8
          for (int j = 0; j < pixels; j++)
            __builtin_prefetch(call.y + to + h * p.y_stride.h + j * p.y_stride.w + c * multiplier, 1, 2);
      }
      auto lanes_at = [&](const auto* from) { return load_some<whole>(from, lanes); };
      Vec<A> sum[height][pixels];
      // Added to the whole sum: each product that was added to it would round at its size.
      const Vec<A> bias = !call.bias        ? Vec<A>(A(0))
                          : multiplier == 1 ? lanes_at(call.bias + c)
                                            : load_strided(call.bias + c * multiplier + m, multiplier, {0, lanes});
#pragma GCC unroll 2
      for (int h = 0; h < height; h++)
#pragma GCC unroll 8
        for (int j = 0; j < pixels; j++) sum[h][j] = A(0);
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
            // Padding is narrower than the kernel (form_for): no others can lie outside.
            if ((i < columns - 1 && i < first) || (i > reach - columns && i >= last)) continue;
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
          const bool upper = r<p.kernel_height, lower = count> 1 && r >= p.stride_h;
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
        for (int j = 0; j < pixels; j++) sum[h][j] += bias;
      auto place = [&](int h, int j) { return to + h * p.y_stride.h + j * p.y_stride.w + c * multiplier; };
      if constexpr (fused != Fused::any) {
        auto finished = [&](Vec<A> v) {
          if constexpr (fused == Fused::bounded) return at_most(most, relu(v));
          if constexpr (fused == Fused::hardswish) return activate_inline(Activation::hardswish, v);
          if constexpr (fused == Fused::silu) return activate_inline(Activation::silu, v);
          return v;
        };
        auto put = [&](int h) {
#pragma GCC unroll 8
          for (int j = 0; j < pixels; j++)
            whole ? store(call.y + place(h, j), finished(sum[h][j]))
                  : store_partial(call.y + place(h, j), finished(sum[h][j]), lanes);
        };
        put(0);
        if constexpr (height > 1)
          if (count > 1) put(1);
        return;
      }
      // One loop over a copy in memory: code for each sum in its register would be long, and calls spill those that are left.
      Vec<A> sums[height * pixels];
#pragma GCC unroll 2
      for (int h = 0; h < height; h++)
#pragma GCC unroll 8
        for (int j = 0; j < pixels; j++) sums[h * pixels + j] = sum[h][j];
#pragma GCC unroll 1
      for (int i = 0; i < count * pixels; i++) {
        const int h = i / pixels, j = i % pixels;
        if (call.called) [[unlikely]]
          call.put_called(place(h, j), multiplier, lanes, sums[i], c * multiplier + m, multiplier);
        else if (whole && multiplier == 1)
          call.put_whole(place(h, j), sums[i]);
        else
          call.put_any(place(h, j), multiplier, lanes, sums[i]);
      }
    };
    int64_t c = begin;
    if constexpr (columns > 0 && fused != Fused::any) {
      for (;; c = end - width) {  // an inner loop of equal steps: otherwise every address would be computed anew
        for (; c + width <= end; c += width) vector.template operator()<true>(c, width);
        if (c == end) break;
      }
    } else {
      for (; c + width <= end; c += width) vector.template operator()<true>(c, width);
      if (c < end) vector.template operator()<false>(c, end - c);
    }
  }
}

template <class T>
using RowsOf = decltype(&rows_of<T, 1, 1, 0, 0, Fused::any>);
// The form with known columns and stride, if there is one. Of 7 columns it has none of its own for what costs little beside so
// many taps.
template <class T, int height, int pixels, Fused fused>
RowsOf<T> form_for(const Conv2dProblem& p) {
  if constexpr (!kIsUnrolled<T>) return nullptr;
  auto of_stride = [&]<int stride>() -> RowsOf<T> {
    if (p.kernel_width == 3) return rows_of<T, height, pixels, 3, stride, fused>;
    if (p.kernel_width == 5) return rows_of<T, height, pixels, 5, stride, fused>;
    constexpr bool rare = fused == Fused::hardswish || fused == Fused::silu;
    if (p.kernel_width == 7) return rows_of < T, height, pixels, 7, stride, rare ? Fused::any : fused > ;
    return nullptr;
  };
  const bool wide = p.pad_w >= p.kernel_width;
  if (p.out_width < kFewPixels || p.dilation_h != 1 || p.dilation_w != 1 || p.stride_w > 2 || wide) return nullptr;
  return p.stride_w == 1 ? of_stride.template operator()<1>() : of_stride.template operator()<2>();
}

// NCHW: `count` columns of a row of one output plane, up to `vectors` vectors.
template <class T, int vectors>
AI3_INLINE void segment(const Call<T>& call, const T* plane, const Acc<T>* w, int64_t k, int64_t to, int64_t row, int64_t column,
                        int64_t count) {
  using A = Acc<T>;
  constexpr int width = Vec<A>::width;
  const Conv2dProblem& p = call.p;
  const int64_t top = row * p.stride_h - p.pad_h, left = column * p.stride_w - p.pad_w, step = p.stride_w * p.x_stride.w;
  const Range rows = inside(top, p.dilation_h, p.in_height, p.kernel_height);
  Vec<A> sum[vectors];
#pragma GCC unroll 4
  for (int q = 0; q < vectors; q++) sum[q] = A(0);
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
  const Vec<A> bias = call.bias ? widen(call.bias[k]) : A(0);
#pragma GCC unroll 4
  for (int q = 0; q < vectors; q++)
    if (q * width < count)
      call.put(to + row * p.y_stride.h + (column + q * width) * p.y_stride.w, p.y_stride.w, smaller(width, count - q * width),
               sum[q] + bias, k);
}

// NCHW: rows [begin, end) of all output planes.
template <class T>
void rows_of_planes(const Call<T>& call, int64_t begin, int64_t end) {
  constexpr int64_t width = Vec<Acc<T>>::width;
  const Conv2dProblem& p = call.p;
  for (int64_t i = begin; i < end; i++) {
    const int64_t row = i % p.out_height, plane = i / p.out_height;
    const int64_t n = plane / p.out_channels, k = plane % p.out_channels, c = k / call.multiplier, f = k % call.multiplier;
    const T* from = call.x + n * p.x_stride.n + c * p.x_stride.c;
    const Acc<T>* w = call.w + f * p.kernel_height * p.kernel_width * p.in_channels + c;
    const int64_t to = n * p.y_stride.n + k * p.y_stride.c;
    int64_t column = 0;
    for (; p.out_width - column > width; column += smaller(kVectors * width, p.out_width - column))
      segment<T, kVectors>(call, from, w, k, to, row, column, smaller(kVectors * width, p.out_width - column));
    if (column < p.out_width) segment<T, 1>(call, from, w, k, to, row, column, p.out_width - column);
  }
}

// Few rows are cut into blocks of channels, so that threads get equal shares. None has less than a vector of them, if there are
// as many.
struct ChannelBlocks {
  int64_t channels, width, vectors, count;
  ChannelBlocks(int64_t c, int64_t vector_width, int threads, int64_t rows)
      : channels(c),
        width(vector_width),
        vectors(larger(1, c / width)),
        count(larger(1, smaller(vectors, ceil_div(16 * threads, larger(1, rows))))) {}
  Range operator[](int64_t i) const {
    return {vectors * i / count * width, i + 1 == count ? channels : vectors * (i + 1) / count * width};
  }
};

// NHWC: which code computes rows of output, and how many at once.
template <class T>
struct RowForms {
  RowsOf<T> band, rest;
  int64_t height;     // rows of a band
  int64_t columns;    // those of tiles of kPixels; `rest` computes the others
  bool reaches_back;  // over channels: the forms need a vector of them

  explicit RowForms(const Call<T>& call) {
    const Conv2dProblem& p = call.p;
    const Fused fused = !kIsCommon<T> || p.in_channels < Vec<Acc<T>>::width ? Fused::any : fused_of(call);
    auto form = [&]<int rows, int pixels>() {
      if constexpr (kIsCommon<T>)
        if (fused == Fused::nothing) return form_for<T, rows, pixels, Fused::nothing>(p);
      // Few pixels have no code of their own for activations.
      if constexpr (pixels == kPixels && kIsCommon<T>) {
        if (fused == Fused::bounded) return form_for<T, rows, pixels, Fused::bounded>(p);
        if (fused == Fused::hardswish) return form_for<T, rows, pixels, Fused::hardswish>(p);
        if (fused == Fused::silu) return form_for<T, rows, pixels, Fused::silu>(p);
      }
      return form_for<T, rows, pixels, Fused::any>(p);
    };
    band = form.template operator()<kHeightOf<T>, kPixels>(), rest = form.template operator()<1, kFewPixels>();
    height = band ? kHeightOf<T> : 1;
    reaches_back = band && fused != Fused::any;
    const int64_t over = p.out_width % kPixels;
    // A residual that is the output is read before a tile is written, so that no two tiles may share an output.
    const bool apart = call.residual == call.y;
    const bool reach_back = band && !apart && p.out_width > kPixels && over > kFewPixels;
    columns = reach_back ? p.out_width : p.out_width - over;
    auto of_any_columns = [&]<int pixels>() -> RowsOf<T> {
      if constexpr (kIsCommon<T>)
        if (fused == Fused::nothing) return rows_of<T, 1, pixels, 0, 0, Fused::nothing>;
      return rows_of<T, 1, pixels, 0, 0, Fused::any>;
    };
    if (!band) band = of_any_columns.template operator()<kPixels>(), rest = nullptr;
    if (!rest || apart) rest = of_any_columns.template operator()<1>();
  }
  // At most `height` rows from `first` on, for channels [begin, end) of an image.
  AI3_INLINE void operator()(const Call<T>& call, int64_t image, int64_t begin, int64_t end, int64_t first, int64_t last) const {
    const int64_t width = call.p.out_width;
    const int64_t rows = smaller(height, last - first);
    for (int64_t f = 0; f < call.multiplier; f++) {
      band(call, image, f, begin, end, first, rows, 0, columns);
      for (int64_t h = first; h < first + rows; h++) rest(call, image, f, begin, end, h, 1, columns, width);
    }
  }
};

// NCHW: a band of rows of a vector's channels is transposed into memory where NHWC's code reads it, and what that writes is
// transposed back. With columns as lanes every tap would be a load of its own, at the image's edges with a mask: AVX2 took two to
// seven times as long (docs/decisions/depthwise.md).
template <class T>
struct Bands {
  static constexpr int64_t width = Vec<Acc<T>>::width;
  static constexpr int64_t kBytes = 128 << 10;  // of a band's input and output: they stay in L2
  const Conv2dProblem& p;
  int64_t multiplier, blocks, rows, count;  // blocks of channels of an image; output rows of a band; bands of an image

  explicit Bands(const Conv2dProblem& problem) : p(problem), multiplier(p.out_channels / p.in_channels) {
    const int64_t row = (p.in_width * p.stride_h + p.out_width * multiplier) * width * static_cast<int64_t>(sizeof(T));
    blocks = ceil_div(p.in_channels, width);
    rows = smaller(p.out_height, larger(kHeight, kBytes / larger(1, row) / kHeight * kHeight));
    count = ceil_div(p.out_height, larger(1, rows));
  }
  // Whether it pays: with fewer channels most lanes would be empty.
  static bool take(const Conv2dProblem& p) {
    return p.in_channels >= width / 2 && p.x_stride.w == 1 && p.y_stride.w == 1 && p.out_height > 0;
  }
  int64_t reach() const { return (p.kernel_height - 1) * p.dilation_h + 1; }
  int64_t input_elements() const {
    return checked_product({smaller(p.in_height, (rows - 1) * p.stride_h + reach()), p.in_width, width});
  }
  int64_t output_elements() const { return checked_product({rows, p.out_width, multiplier, width}); }
  int64_t workspace() const {
    return checked_add(workspace_bytes<T>(checked_mul(p.threads, input_elements())),
                       workspace_bytes<T>(checked_mul(p.threads, output_elements())));
  }

  void run(const Call<T>& call, Workspace& workspace) const {
    const int64_t in = input_elements(), out = output_elements(), pixel = width * multiplier;
    T *const inputs = workspace.take<T>(p.threads * in), *const outputs = workspace.take<T>(p.threads * out);
    Conv2dProblem q = p;
    q.x_stride = {0, 1, p.in_width * width, width}, q.y_stride = {0, 1, p.out_width * pixel, pixel};
    const Call<T> sample{q,     inputs,     call.bias,  call.residual ? outputs : nullptr, call.w, outputs, multiplier,
                         false, call.slope, call.called};
    const RowForms<T> forms(sample);
    const int64_t work = rows * p.out_width * p.kernel_height * p.kernel_width * pixel;
    parallel_ranges(p.threads, p.batch * blocks * count, ceil_div(1 << 16, work), [&](int64_t begin, int64_t end, int thread) {
      for (int64_t i = begin; i < end; i++) {
        const int64_t band = i % count, block = i / count % blocks, n = i / count / blocks;
        const int64_t c = forms.reaches_back ? smaller(block * width, p.in_channels - width) : block * width,
                      lanes = smaller(width, p.in_channels - c), known = block * width - c;  // lanes of the block before
        const int64_t first = band * rows, last = smaller(p.out_height, first + rows);
        const int64_t top = larger(0, first * p.stride_h - p.pad_h),
                      bottom = smaller(p.in_height, (last - 1) * p.stride_h - p.pad_h + reach());
        T *const x = inputs + thread * in, *const y = outputs + thread * out;
        each_piece(top, bottom, p.in_width, p.x_stride.h, [&](int64_t row, int64_t elements) {
          to_lanes(call.x + n * p.x_stride.n + c * p.x_stride.c + row * p.x_stride.h, p.x_stride.c, lanes, elements,
                   x + (row - top) * p.in_width * width, width);
        });
        // Of output channels [c * multiplier, (c + lanes) * multiplier), a vector of them and then the next.
        auto each_output = [&](const auto& copy) {
          for (int64_t k = 0; k < lanes * multiplier; k += width)
            each_piece(first, last, p.out_width, p.y_stride.h, [&](int64_t row, int64_t elements) {
              copy(n * p.y_stride.n + (c * multiplier + k) * p.y_stride.c + row * p.y_stride.h,
                   Range{known, smaller(width, lanes * multiplier - k)}, elements, y + (row - first) * p.out_width * pixel + k);
            });
        };
        if (call.residual)
          each_output([&](int64_t at, Range planes, int64_t elements, T* to) {
            to_lanes(call.residual + at, p.y_stride.c, planes.end, elements, to, pixel);
          });
        Call<T> local = sample;
        local.x = x - top * q.x_stride.h - c, local.y = y - first * q.y_stride.h - c * multiplier;
        if (call.residual) local.residual = local.y;
        for (int64_t row = first; row < last; row += forms.height) forms(local, 0, c, c + lanes, row, last);
        each_output([&](int64_t at, Range planes, int64_t elements, const T* from) {
          to_planes(from, pixel, planes, elements, call.y + at, p.y_stride.c);
        });
      }
    });
  }
};

// Whether lanes are channels: in NHWC, or in bands of NCHW.
bool in_bands(const Conv2dProblem& p) {
  const bool nhwc = p.x_stride.c == 1 && p.y_stride.c == 1;
  return !nhwc && with_type(p.dtype, [&]<class T>() { return Bands<T>::take(p); });
}
int64_t workspace(const Conv2dProblem& p) {
  return in_bands(p) ? with_type(p.dtype, [&]<class T>() { return Bands<T>(p).workspace(); }) : 0;
}

template <class T>
void conv2d_depthwise(const Conv2dProblem& p, const Conv2dOperands& m, Workspace& workspace) {
  constexpr int64_t width = Vec<Acc<T>>::width;
  const Call<T> call{p,
                     m.input.read<T>(),
                     m.bias.read<T>(),
                     m.residual.read<T>(),
                     m.weight.read<Acc<T>>(),
                     m.output.write<T>(),
                     p.out_channels / p.in_channels,
                     bytes(p) > static_cast<double>(kCached),
                     m.slope.read<Acc<T>>(),
                     is_called(p.activation)};
  if (in_bands(p)) return Bands<T>(p).run(call, workspace);
  const int64_t window = p.kernel_height * p.kernel_width;
  if (p.x_stride.c != 1 || p.y_stride.c != 1)
    return parallel_ranges(p.threads, p.batch * p.out_channels * p.out_height, ceil_div(1 << 16, window * p.out_width),
                           [&](int64_t begin, int64_t end, int) { rows_of_planes(call, begin, end); });
  const RowForms<T> forms(call);
  const int64_t bands = ceil_div(p.out_height, forms.height);
  const ChannelBlocks channel_blocks(p.in_channels, width, p.threads, p.batch * bands);
  const int64_t blocks = channel_blocks.count;
  const int64_t work = forms.height * window * p.out_width * (p.out_channels / blocks);
  parallel_ranges(p.threads, p.batch * bands * blocks, ceil_div(1 << 16, work), [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t row = i / blocks % bands * forms.height;
      const auto [first, last] = channel_blocks[i % blocks];
      forms(call, i / blocks / bands, first, last, row, smaller(row + forms.height, p.out_height));
    }
  });
}

// ---- gradients, NHWC ---------------------------------------------------------------------------------------------------------

// The taps of one dimension that reach an element `position` places behind the padded edge: first, first + step, ...; the first
// meets dY's element `at`, each further one the element `back` before.
struct Taps {
  int64_t first = 0, step, at, back;
  Taps(int64_t position, int64_t dilation, int64_t stride, int64_t kernel)
      : step(stride / greatest_common_divisor(stride, dilation)) {
    while (first < kernel && (position - first * dilation) % stride) first++;
    at = (position - first * dilation) / stride, back = step * dilation / stride;
  }
};

// A row of dX, channels [begin, end): each output that saw an element gives its gradient times the weight between them.
template <class T>
void input_gradient_row(const Conv2dProblem& p, const T* gy, const Acc<T>* w, T* dx, int64_t row, int64_t begin, int64_t end) {
  using A = Acc<T>;
  constexpr int64_t width = Vec<A>::width;
  const int64_t multiplier = p.out_channels / p.in_channels, window = p.kernel_height * p.kernel_width;
  const Taps rows(row + p.pad_h, p.dilation_h, p.stride_h, p.kernel_height);
  for (int64_t phase = 0; phase < smaller(p.stride_w, p.in_width); phase++) {  // columns that the same taps reach
    const Taps columns(phase + p.pad_w, p.dilation_w, p.stride_w, p.kernel_width);
    const int64_t count = ceil_div(p.in_width - phase, p.stride_w);
    for (int64_t tile = 0; tile < count; tile += kPixels) {
      const int64_t pixels = smaller(kPixels, count - tile);
      T* to = dx + row * p.x_stride.h + (phase + tile * p.stride_w) * p.x_stride.w;
      for (int64_t c = begin; c < end; c += width) {
        const int64_t lanes = smaller(width, end - c);
        const bool whole = lanes == width;
        Vec<A> sum[kPixels];
#pragma GCC unroll 8
        for (int j = 0; j < kPixels; j++) sum[j] = A(0);
        for (int64_t r = rows.first, h = rows.at; r < p.kernel_height; r += rows.step, h -= rows.back) {
          if (h < 0 || h >= p.out_height) continue;
          for (int64_t s = columns.first, v = columns.at + tile; s < p.kernel_width; s += columns.step, v -= columns.back) {
            const Range seen = inside(v, 1, p.out_width, pixels);
            for (int64_t m = 0; m < multiplier; m++) {
              const A* at = w + (m * window + r * p.kernel_width + s) * p.in_channels + c;
              const Vec<A> weights = whole ? load(at) : load_partial(at, lanes);
              const T* from = gy + h * p.y_stride.h + v * p.y_stride.w + c * multiplier + m;
#pragma GCC unroll 8
              for (int j = 0; j < kPixels; j++)
                if (j >= seen.begin && j < seen.end) {
                  const T* pixel = from + j * p.y_stride.w;
                  const bool plain = whole && multiplier == 1;
                  sum[j] = fma(plain ? load(pixel) : load_strided(pixel, multiplier, {0, lanes}), weights, sum[j]);
                }
            }
          }
        }
#pragma GCC unroll 8
        for (int j = 0; j < kPixels; j++)
          if (j < pixels) {
            T* pixel = to + j * p.stride_w * p.x_stride.w + c;
            whole ? store(pixel, sum[j]) : store_partial(pixel, sum[j], lanes);
          }
      }
    }
  }
}

template <class T>
void input_gradient(const Conv2dProblem& p, const T* gy, const T* w, T* dx, Workspace& workspace) {
  const bool turned = p.out_channels == p.in_channels && p.stride_h == 1 && p.stride_w == 1;
  Acc<T>* packed = workspace.take<Acc<T>>(packed_bytes(p) / static_cast<int64_t>(sizeof(Acc<T>)));
  pack_taps(p, w, turned, packed);
  if (turned) return conv2d_depthwise<T>(transposed(p), {gy, packed, nullptr, nullptr, dx}, workspace);
  const ChannelBlocks blocks(p.in_channels, Vec<Acc<T>>::width, p.threads, p.batch * p.in_height);
  parallel_ranges(p.threads, p.batch * p.in_height * blocks.count, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t row = i / blocks.count % p.in_height, n = i / blocks.count / p.in_height;
      const Range channels = blocks[i % blocks.count];
      input_gradient_row(p, gy + n * p.y_stride.n, packed, dx + n * p.x_stride.n, row, channels.begin, channels.end);
    }
  });
}

// A row of dY against the rows of x below `rows` rows of the kernel: one vector of channels' sums, a vector for each tap. A
// number of columns that is known keeps them in registers, and each element of dY is loaded once; several rows at once, so that
// enough sums are under way. The next vector of channels of what is new is prefetched: pixels are too far apart for the
// prefetchers.
template <class T, int rows, int columns>
void weight_gradient_rows(const Conv2dProblem& p, const T* gy, const T* x, int64_t lanes, Acc<T>* sums) {
  using A = Acc<T>;
  constexpr int64_t width = Vec<A>::width;
  const int64_t multiplier = p.out_channels / p.in_channels, step = p.dilation_w * p.x_stride.w,
                below = p.dilation_h * p.x_stride.h;
  auto seen = [&](int64_t s) { return inside(s * p.dilation_w - p.pad_w, p.stride_w, p.in_width, p.out_width); };
  auto run = [&]<bool whole>() {
    auto grad_at = [&](int64_t j) {
      const T* from = gy + j * p.y_stride.w;
      return whole ? load(from) : load_strided(from, multiplier, {0, lanes});
    };
    auto pixel = [&](int64_t j, int64_t r, int64_t s) {
      return x + (j * p.stride_w - p.pad_w) * p.x_stride.w + r * below + s * step;
    };
    auto input_at = [&](int64_t j, int64_t r, int64_t s) { return load_some<whole>(pixel(j, r, s), lanes); };
    if constexpr (columns > 0) {
      Range range[columns];
      Vec<A> sum[rows][columns];
      Range every = {0, p.out_width}, any = {p.out_width, 0};
#pragma GCC unroll 8
      for (int s = 0; s < columns; s++) {
        range[s] = seen(s);
        every = {larger(every.begin, range[s].begin), smaller(every.end, range[s].end)};
        any = {smaller(any.begin, range[s].begin), larger(any.end, range[s].end)};
      }
      auto each = [&](const auto& body) {
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
          for (int s = 0; s < columns; s++) body(r, s);
      };
      each([&](int r, int s) { sum[r][s] = load(sums + (r * columns + s) * width); });
      auto edge = [&](int64_t j) {
        const Vec<A> grad = grad_at(j);
        each([&](int r, int s) {
          if (j >= range[s].begin && j < range[s].end) sum[r][s] = fma(input_at(j, r, s), grad, sum[r][s]);
        });
      };
      int64_t j = any.begin;
      for (; j < every.begin; j++) edge(j);
      for (; j < every.end; j++) {
        const Vec<A> grad = grad_at(j);
        __builtin_prefetch(gy + j * p.y_stride.w + multiplier * width);
        __builtin_prefetch(pixel(j, rows - 1, columns - 1) + width);
        each([&](int r, int s) { sum[r][s] = fma(input_at(j, r, s), grad, sum[r][s]); });
      }
      for (; j < any.end; j++) edge(j);
      each([&](int r, int s) { store(sums + (r * columns + s) * width, sum[r][s]); });
    } else {
      for (int64_t s = 0; s < p.kernel_width; s++) {
        const Range range = seen(s);
        Vec<A> sum = load(sums + s * width);
        for (int64_t j = range.begin; j < range.end; j++) sum = fma(input_at(j, 0, s), grad_at(j), sum);
        store(sums + s * width, sum);
      }
    }
  };
  lanes == width&& multiplier == 1 ? run.template operator()<true>() : run.template operator()<false>();
}

// dW is summed over slices of dY's rows, in each slice row by row, then over the slices. How many there are depends on the
// problem alone, so that threads don't change the order.
template <class T>
struct WeightGradient {
  using A = Acc<T>;
  static constexpr int64_t width = Vec<A>::width;
  const Conv2dProblem& p;
  const int64_t multiplier = p.out_channels / p.in_channels, window = p.kernel_height * p.kernel_width;
  const int64_t vectors = ceil_div(p.in_channels, width), rows = p.batch * p.out_height;
  const int64_t slices = larger(1, smaller(smaller(8, rows), rows* p.out_width / 512));
  const int64_t block = (window + 1) * width;  // a vector of channels: the sums of each tap, and of dY alone

  int64_t elements() const { return checked_product({slices, multiplier, vectors, block}); }
  int64_t workspace() const { return workspace_bytes<A>(elements()); }

  void run(const T* gy, const T* x, T* dw, T* db, Workspace& workspace) const {
    A* sums = workspace.take<A>(elements());
    const ChannelBlocks blocks(p.in_channels, width, p.threads, slices);
    parallel_for(p.threads, slices * blocks.count, [&](int64_t i, int) {
      const int64_t slice = i / blocks.count;
      add_up(gy, x, {slice * rows / slices, (slice + 1) * rows / slices}, blocks[i % blocks.count], db,
             sums + slice * multiplier * vectors * block);
    });
    parallel_ranges(p.threads, multiplier * vectors, 16, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; i++) {
        const int64_t m = i / vectors, c = i % vectors * width, lanes = smaller(width, p.in_channels - c);
        for (int64_t tap = 0; tap <= window; tap++) {
          Vec<A> sum = A(0);
          for (int64_t slice = 0; slice < slices; slice++)
            sum += load(sums + (slice * multiplier * vectors + i) * block + tap * width);
          for (int l = 0; l < lanes; l++) {
            const int64_t k = (c + l) * multiplier + m;
            if (tap < window)
              narrow(sum[l], dw[k * window + tap]);
            else if (db)
              narrow(sum[l], db[k]);
          }
        }
      }
    });
  }

  // Bands of rows stay in the L2 cache for all channels.
  void add_up(const T* gy, const T* x, Range slice, Range channels, bool with_bias, A* sums) const {
    const int64_t row_bytes = (p.in_width + p.out_width) * p.in_channels * static_cast<int64_t>(sizeof(T));
    const int64_t band = larger(1, (256 << 10) / larger(1, row_bytes));
    auto row_form = weight_gradient_rows<T, 1, 0>, window_form = static_cast<decltype(row_form)>(nullptr);
    if constexpr (kIsCommon<T>) {
      // All taps of a window that fit the registers.
      constexpr int most = AI3_VECTOR_BYTES == 64 ? 5 : 3;
      const bool square = p.kernel_height == p.kernel_width;
      if (p.kernel_width == 3) row_form = weight_gradient_rows<T, 1, 3>;
      if (p.kernel_width == 5) row_form = weight_gradient_rows<T, 1, 5>;
      if (p.kernel_width == 7) row_form = weight_gradient_rows<T, 1, 7>;
      if (square && p.kernel_width == most) window_form = weight_gradient_rows<T, most, most>;
      if (square && p.kernel_width == 3) window_form = weight_gradient_rows<T, 3, 3>;
    }
    for (int64_t first = slice.begin; first < slice.end; first += band)
      for (int64_t m = 0; m < multiplier; m++)
        for (int64_t c = channels.begin; c < channels.end; c += width) {
          A* to = sums + (m * vectors + c / width) * block;
          if (first == slice.begin)
            for (int64_t tap = 0; tap <= window; tap++) store(to + tap * width, Vec<A>(A(0)));
          const int64_t lanes = smaller(width, p.in_channels - c);
          for (int64_t row = first; row < smaller(slice.end, first + band); row++) {
            const int64_t n = row / p.out_height, oh = row % p.out_height, top = oh * p.stride_h - p.pad_h;
            const T* grad = gy + n * p.y_stride.n + oh * p.y_stride.h + c * multiplier + m;
            const Range seen = inside(top, p.dilation_h, p.in_height, p.kernel_height);
            const bool joint = window_form && seen.size() == p.kernel_height;
            for (int64_t r = seen.begin; r < seen.end; r += joint ? p.kernel_height : 1)
              (joint ? window_form : row_form)(p, grad, x + n * p.x_stride.n + (top + r * p.dilation_h) * p.x_stride.h + c, lanes,
                                               to + r * p.kernel_width * width);
            if (with_bias) {
              const bool plain = multiplier == 1 && lanes == width;
              Vec<A> even = load(to + window * width), odd = A(0);
              for (int64_t j = 0; j < p.out_width; j++) {
                const T* from = grad + j * p.y_stride.w;
                (j % 2 ? odd : even) += plain ? load(from) : load_strided(from, multiplier, {0, lanes});
              }
              store(to + window * width, even + odd);
            }
          }
        }
  }
};

// In NCHW, PyTorch's operators compute them.
GradientNames gradients(const Conv2dProblem& p) {
  const char* name = p.x_stride.c == 1 && p.y_stride.c == 1 ? "depthwise" : nullptr;
  return {name, name};
}
int64_t backward_workspace(const Conv2dProblem& p, const WeightedGradients& m) {
  return with_type(p.dtype, [&]<class T>() {
    const int64_t input = m.grad_input ? workspace_bytes<char>(packed_bytes(p)) : 0;
    return checked_add(input, m.grad_weight ? WeightGradient<T>{p}.workspace() : 0);
  });
}
void backward(const Conv2dProblem& p, const WeightedGradients& m, Workspace& workspace) {
  with_type(p.dtype, [&]<class T>() {
    const T *gy = m.grad_output.read<T>(), *x = m.input.read<T>(), *w = m.weight.read<T>();
    if (m.grad_input) input_gradient(p, gy, w, m.grad_input.write<T>(), workspace);
    if (m.grad_weight) WeightGradient<T>{p}.run(gy, x, m.grad_weight.write<T>(), m.grad_bias.write<T>(), workspace);
  });
}

Cost cost(const Conv2dProblem& p) {
  return {2 * outputs(p) * static_cast<double>(p.kernel_height * p.kernel_width), bytes(p), .6};
}

AI3_ALGORITHM(conv2d, depthwise, .epilogue = true, .supports = supports, .workspace = workspace, .cost = cost,
              .packed_bytes = packed_bytes, .pack = pack, .gradients = gradients, .backward = backward,
              .backward_workspace = backward_workspace, .sliced = true)

}  // namespace

const Algorithm<Conv2dProblem>& conv2d_depthwise_record() { return conv2d_depthwise_algorithm; }

}  // namespace ai3::inline AI3_LEVEL

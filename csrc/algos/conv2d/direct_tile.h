// The register tile of direct convolution: a few neighbouring output pixels of a row by one or two vectors of output channels,
// which stay in registers over all kernel positions and input channels.
#pragma once
#include "../core/instances.h"
#include "../core/prologue.h"
#include "../core/streaming.h"
#include "joined_groups.h"
#include "problem.h"

namespace ai3::inline AI3_LEVEL {
namespace direct {

// Pixels of a register tile: with two vectors each, two of weights and one broadcast they fill 32 or 16 registers. Those of one
// vector each are more in 16 registers: six chains of sums wait for the multiply-adds before them.
constexpr int kPixels = AI3_VECTOR_BYTES == 64 ? 14 : 6, kNarrowPixels = AI3_VECTOR_BYTES == 64 ? 14 : 12;
constexpr int64_t kStageSpan = 256, kStageChannels = 16;  // elements of the tile's input that are widened at a time

template <class A, class B>
constexpr bool same = false;
template <class A>
constexpr bool same<A, A> = true;

// How sums come into the output: its lines, which are not read, are likely in a core's own cache where it is small; those of a
// larger one are prefetched, or go past the caches where it is large and they are stored as a whole; or sums are added to what is
// there. In bytes of output (docs/decisions/direct.md); kLargeFromImages is of layers of up to four channels.
enum class Lines { cached, prefetched, past_caches, added_to };
constexpr int64_t kPrefetchedFrom = 256 << 10, kLargeFrom = 4 << 20, kLargeFromImages = 3 << 20;

// Kernel positions and channels that a tile adds up, with the strides from one to the next; how many tiles follow each other in
// the row, and how many blocks of output channels each of them has, whose biases lie `bias_block` apart; how far behind
// its own pixels those lie that a tile prefetches, which others need next (0: none). `spread`: a vector of a pixel's channels
// holds those of several groups, `channels` each.
struct Span {
  int64_t rows, columns, channels;
  int64_t x_row, x_column, x_channel, x_pixel;
  int64_t w_row, w_column, w_channel, w_block;
  int64_t tiles = 1, blocks = 1, bias_block = 0, ahead = 0;
  Lines lines = Lines::cached;
  bool spread = false;
  // What is applied in registers, where a tile is finished at once; the residual, laid out as the output, lies so many bytes
  // behind it (0: none): one more pointer would have no register.
  Activation activation = Activation::none;
  int64_t residual_behind = 0;
  int64_t rest = 0;  // elements of a tile's last vector that are stored, where that is a part of one (0: all)
};
template <class A>
constexpr A kZeros[2 * Vec<A>::width] = {};

// tile[j][0 .. v vectors) = (sum over the span of x[j] * w) + bias, for n pixels: each product that was added to the bias would
// round at its size. No loop of the span is empty, and nothing else needs addresses here: otherwise the compiler keeps a second
// copy of the sums on the stack. The loop over tiles is in here because few channels make short tiles: found one by one, they
// take a third longer. `finished`: with the residual and the activation, in registers; a form of its own, since what it adds
// costs long products 5 % in their inner loop.
template <class A, int n, int v, bool spread = false, bool finished = false>
[[gnu::noinline]] void accumulate(const A* x, const A* w, A* tile, int64_t tile_pixel, const A* bias, const Span& span) {
  constexpr int width = Vec<A>::width;
  const int64_t x_channel = span.x_channel, x_pixel = span.x_pixel, w_channel = span.w_channel;
  // Each row of the window prefetches as many pixels of the row as the tile has, each step its share of them; of planes, each
  // column its share of every channel's.
  const bool planes = !spread && x_channel != 1;
  const int64_t tile_bytes = span.ahead ? n * x_pixel * static_cast<int64_t>(sizeof(A)) / (span.blocks * span.columns) : 0,
                share_bytes = tile_bytes / span.channels,
                next_channel = !planes      ? share_bytes
                               : span.ahead ? x_channel * static_cast<int64_t>(sizeof(A))
                                            : 0,
                next_column = planes ? tile_bytes : share_bytes * span.channels;
  const Places<A> own = spread ? first_of_group<A>(span.channels) : Places<A>{};
  int64_t tiles = span.tiles;
  do {
    int64_t blocks = span.blocks;
    int64_t prefetched = 0;  // bytes of each row
    const A *wb = w, *of_block = bias;
    A* to = tile;
    do {
      Vec<A> sum[n][v];
#pragma GCC unroll 16
      for (int j = 0; j < n; j++)
#pragma GCC unroll 2
        for (int q = 0; q < v; q++) sum[j][q] = A(0);
      if (span.lines == Lines::prefetched)
        for (int j = 0; j < n; j++)
#pragma GCC unroll 2
          for (int q = 0; q < v; q++) __builtin_prefetch(to + j * tile_pixel + q * width, 1);
      int64_t r = span.rows;
      const A *xr = x, *wr = wb;
      do {
        int64_t s = span.columns;
        const A *xs = xr, *ws = wr;
        const char* next_of_column = reinterpret_cast<const char*>(xr + span.ahead) + prefetched;
        do {
          int64_t c = span.channels;
          const char* next = next_of_column;
          Apart<const A, n> pixels(xs, x_pixel);
          const A* wc = ws;
          Places<A> channel = own;
          do {
            Vec<A> weights[v];
#pragma GCC unroll 2
            for (int q = 0; q < v; q++) weights[q] = load(wc + q * width);
#pragma GCC unroll 16
            for (int j = 0; j < n; j++) {
              Vec<A> pixel;
              if constexpr (spread)
                pixel = __builtin_shuffle(load(pixels[j]).raw, channel);
              else
                pixel = *pixels[j];
#pragma GCC unroll 2
              for (int q = 0; q < v; q++) sum[j][q] = fma(weights[q], pixel, sum[j][q]);
            }
            __builtin_prefetch(next);
            if constexpr (spread)
              channel += 1;
            else
              pixels += x_channel;
            wc += w_channel, next += next_channel;
          } while (--c);
          xs += span.x_column, ws += span.w_column, next_of_column += next_column;
        } while (--s);
        xr += span.x_row, wr += span.w_row;
      } while (--r);
#pragma GCC unroll 2
      for (int q = 0; q < v; q++) {
        const Vec<A> last = load(of_block + q * width);
#pragma GCC unroll 16
        for (int j = 0; j < n; j++) sum[j][q] += last;
      }
      const Apart<A, n> rows(to, tile_pixel);
      auto each = [&](const auto& put) __attribute__((always_inline)) {
#pragma GCC unroll 16
        for (int j = 0; j < n; j++)
#pragma GCC unroll 2
          for (int q = 0; q < v; q++) put(rows[j] + q * width, sum[j][q], q == v - 1);
      };
      if constexpr (finished)
        with_registers(
            span.activation, span.residual_behind != 0, [&]<Activation activation, bool added>() __attribute__((always_inline)) {
              each([&](A * p, Vec<A> s, bool) __attribute__((always_inline)) {
                if constexpr (added)
                  s += load(reinterpret_cast<const A*>(reinterpret_cast<const char*>(p) + span.residual_behind));
                store(p, activate_inline(activation, s));
              });
            });
      else if (span.lines == Lines::past_caches)
        each([](A* p, Vec<A> s, bool) { store_streaming(p, s); });
      else if (span.lines == Lines::added_to)
        each([](A* p, Vec<A> s, bool) { store(p, load(p) + s); });
      else if (span.rest)
        each([rest = span.rest](A* p, Vec<A> s, bool last) { last ? store_partial(p, s, rest) : store(p, s); });
      else
        each([](A* p, Vec<A> s, bool) { store(p, s); });
      wb += span.w_block, of_block += span.bias_block, to += v * width, prefetched += next_column * span.columns;
    } while (--blocks);
    x += n * x_pixel, tile += n * tile_pixel;
  } while (--tiles);
}
// Of `pixels`, n at most.
template <int n, bool finished = false, class A>
AI3_INLINE void accumulate(int64_t pixels, bool two, const A* x, const A* w, A* tile, int64_t tile_pixel, const A* bias,
                           const Span& span) {
  if (pixels == n)
    (two && n <= kPixels ? accumulate<A, (n < kPixels ? n : kPixels), 2, false, finished>
     : !finished && AI3_VECTOR_BYTES > 16 && span.spread
         ? accumulate<A, n, 1, AI3_VECTOR_BYTES >= 32>
         : accumulate<A, n, 1, false, finished>)(x, w, tile, tile_pixel, bias, span);
  else if constexpr (n > 1)
    accumulate<n - 1, finished>(pixels, two, x, w, tile, tile_pixel, bias, span);
}

// The same for an input that must be widened or has a prologue: the tile's part of it goes through a small buffer.
template <class T>
void accumulate_staged(int64_t pixels, bool two, const T* x, const Acc<T>* w, Acc<T>* tile, int64_t tile_pixel,
                       const Acc<T>* bias, const Span& span, const Prologue<Acc<T>>& prologue) {
  using A = Acc<T>;
  alignas(64) A stage[kStageSpan * kStageChannels];
  const bool by_pixel = span.spread || span.x_channel == 1;  // NHWC: channels side by side; NCHW: pixels side by side
  const int64_t chunk = by_pixel ? kStageSpan : kStageChannels, reach = (pixels - 1) * span.x_pixel + 1;
  Lines lines = span.lines;
  for (int64_t r = 0; r < span.rows; r++)
    for (int64_t s = 0; s < span.columns; s++)
      for (int64_t c0 = 0; c0 < span.channels; c0 += chunk) {
        const T* from = x + r * span.x_row + s * span.x_column + c0 * span.x_channel;
        const Prologue<A> f = prologue.from(c0);
        Span part = span;
        part.lines = lines, part.rows = part.columns = 1, part.channels = smaller(chunk, span.channels - c0);
        if (by_pixel) {
          const int64_t count = span.spread ? Vec<A>::width : part.channels;
          for (int64_t j = 0; j < pixels; j++) copy_channels(f, from + j * span.x_pixel, count, stage + j * kStageSpan);
          part.x_pixel = kStageSpan;
        } else {
          for (int64_t c = 0; c < part.channels; c++) {
            const T* row = from + c * span.x_channel;
            if (reach <= kStageSpan)
              copy_pixels(f.from(c), row, reach, stage + c * kStageSpan);
            else
              for (int64_t j = 0; j < pixels; j++) stage[c * kStageSpan + j] = f.from(c)(widen(row[j * span.x_pixel]));
          }
          part.x_channel = kStageSpan, part.x_pixel = reach <= kStageSpan ? span.x_pixel : 1;
        }
        const bool last = r == span.rows - 1 && s == span.columns - 1 && c0 + chunk >= span.channels;
        accumulate<kNarrowPixels>(pixels, two, stage, w + r * span.w_row + s * span.w_column + c0 * span.w_channel, tile,
                                  tile_pixel, last ? bias : kZeros<A>, part);
        lines = Lines::added_to;
      }
}

// Of the output channels from some one on; null where there are none.
template <class T>
struct Channels {
  const T* bias;
  const Acc<T>* slope;
  AI3_INLINE Channels from(int64_t channel) const { return {bias ? bias + channel : nullptr, slope ? slope + channel : nullptr}; }
};

// Adds the residual, applies the activation and stores `pixels` x `count` values of a tile.
template <bool called, class T>
AI3_INLINE void finish_as(const Conv2dProblem& p, const Acc<T>* tile, int64_t tile_pixel, int64_t pixels, int64_t count,
                          const Acc<T>* slope, const T* residual, T* y) {
  using A = Acc<T>;
  constexpr int width = Vec<A>::width;
  const bool by_pixel = p.y_stride.c == 1;
  auto put = [&](Vec<A> v, int64_t channel, int64_t at, int64_t n) {
    if (residual) v += n < width ? load_partial(residual + at, n) : load(residual + at);
    v = activate_stored<called>(p.activation, v, [&] {
      return !by_pixel ? Vec<A>(slope[channel]) : n < width ? load_partial(slope + channel, n) : load(slope + channel);
    });
    n < width ? store_partial(y + at, v, n) : store(y + at, v);
  };
  for (int64_t k0 = 0; k0 < count; k0 += width)
    for (int64_t j0 = 0; j0 < pixels; j0 += width) {
      const int64_t channels = smaller(width, count - k0), columns = smaller(width, pixels - j0);
      Vec<A> rows[width];
      for (int j = 0; j < width; j++) {
        const A* const sums = tile + (j0 + j) * tile_pixel + k0;  // which may be the output
        rows[j] = j >= columns ? Vec<A>(A(0)) : channels < width ? load_partial(sums, channels) : load(sums);
      }
      if (!by_pixel) transpose(rows);
      for (int64_t i = 0; i < (by_pixel ? columns : channels); i++)
        put(rows[i], by_pixel ? k0 : k0 + i, by_pixel ? (j0 + i) * p.y_stride.w + k0 : (k0 + i) * p.y_stride.c + j0,
            by_pixel ? channels : columns);
    }
}
template <class T>
[[gnu::noinline]] void finish_called(const Conv2dProblem& p, const Acc<T>* tile, int64_t tile_pixel, int64_t pixels,
                                     int64_t count, const Acc<T>* slope, const T* residual, T* y) {
  finish_as<true>(p, tile, tile_pixel, pixels, count, slope, residual, y);
}
template <class T>
AI3_INLINE void finish(const Conv2dProblem& p, const Acc<T>* tile, int64_t tile_pixel, int64_t pixels, int64_t count,
                       const Acc<T>* slope, const T* residual, T* y) {
  if (is_called(p.activation)) return finish_called(p, tile, tile_pixel, pixels, count, slope, residual, y);
  finish_as<false>(p, tile, tile_pixel, pixels, count, slope, residual, y);
}

}  // namespace direct
}  // namespace ai3::inline AI3_LEVEL

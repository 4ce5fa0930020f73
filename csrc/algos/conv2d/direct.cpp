// Direct convolution: no transform and no copy of the image. A register tile holds a few neighbouring output pixels of a row by
// two vectors of output channels and stays in registers over all kernel positions and input channels (Georganas et al. 2018,
// Zhang et al. 2018). Weights are read in the blocked form [group][K/b][R][S][C/groups][b], b up to two vectors, in the
// accumulator's type; a 1x1 kernel with stride 1 is a matrix product over pixels, whose rows this file makes as long as it likes.
// Strides are read from the problem, so NCHW and NHWC differ only in how a finished tile is stored.
#include "../core/gemm.h"
#include "../core/prologue.h"
#include "../core/streaming.h"
#include "backward.h"
#include "joined_groups.h"
#include "lent.h"

namespace ai3::inline AI3_LEVEL {
namespace {

// Pixels of a register tile: with two vectors each, two of weights and one broadcast they fill 32 or 16 registers.
constexpr int kPixels = AI3_VECTOR_BYTES == 64 ? 14 : 6;
// A 1x1 kernel on more channels than these is a packed product; with fewer, tiles are too short for it
// (docs/decisions/direct.md).
constexpr int64_t kFewChannels = 64;
constexpr int64_t kStageSpan = 256, kStageChannels = 16;  // elements of the tile's input that are widened at a time

template <class A, class B>
constexpr bool same = false;
template <class A>
constexpr bool same<A, A> = true;

// Whether NHWC pixels are multiplied by pairs of bfloat16, whose panels follow the other weights in the pack.
AI3_INLINE bool multiplies_pairs(const Conv2dProblem& p) {
  return p.dtype == DType::bf16 && is_pointwise(p) && p.in_channels / p.groups % 2 == 0 && has_pair_products();
}

// Joined groups (joined_groups.h) are packed as one.
struct Blocking {
  int64_t channels;                     // of one group
  int64_t joined, groups;               // joined: groups that are packed as one, of which there are `groups`
  int64_t out_channels, block, blocks;  // of them; `block` output channels are stored side by side
  AI3_INLINE explicit Blocking(const Conv2dProblem& p)
      : channels(p.in_channels / p.groups),
        joined(multiplies_pairs(p) ? 1 : joined_groups(p)),
        groups(p.groups / joined),
        out_channels(p.out_channels / groups) {
    const int64_t tile = 2 * lanes_of(p);
    for (block = 4; block < tile && block < out_channels;) block *= 2;
    blocks = ceil_div(out_channels, block);
  }
  // Groups that are packed as one are computed as one where their channels lie side by side.
  AI3_INLINE bool spread(const Conv2dProblem& p) const { return joined > 1 && p.x_stride.c == 1; }
};

int64_t blocks_bytes(const Conv2dProblem& p) {
  const Blocking b(p);
  const int64_t size = p.dtype == DType::f64 ? 8 : 4;
  // Vectors may read past a narrow block, into the next one or this margin; what they find there is not stored.
  return round_up(checked_add(checked_product({size, b.groups, b.blocks, b.block, b.channels, p.kernel_height, p.kernel_width}),
                              2 * AI3_VECTOR_BYTES),
                  64);
}
int64_t packed_bytes(const Conv2dProblem& p) {
  const Blocking b(p);
  const int64_t pairs =
      multiplies_pairs(p) ? checked_product({4, p.groups, packed_size<float>(b.channels / 2, b.out_channels)}) : 0;
  return checked_add(blocks_bytes(p), pairs);
}

void pack(const Conv2dProblem& p, const void* weight, void* packed) {
  const Blocking b(p);
  const int64_t window = p.kernel_height * p.kernel_width, panel = window * b.channels * b.block;
  with_type(p.dtype, [&]<class T>() {
    const T* w = static_cast<const T*>(weight);
    Acc<T>* out = static_cast<Acc<T>*>(packed);
    __builtin_memset(out + b.groups * b.blocks * panel, 0, 2 * AI3_VECTOR_BYTES);
    // A block is the matrix of its output channels by (channel, kernel position), transposed.
    constexpr int width = Vec<Acc<T>>::width;
    const int64_t columns = b.channels * window;
    parallel_for(p.threads, b.groups * b.blocks, [&](int64_t i, int) {
      const int64_t first = i % b.blocks * b.block, count = smaller(b.block, b.out_channels - first);
      const T* from = w + (i / b.blocks * b.out_channels + first) * columns;
      for (int64_t k0 = 0; k0 < b.block; k0 += width) {
        int64_t c = 0, rs = 0;
        for (int64_t e = 0; e < columns; e += width) {
          const int64_t rest = columns - e;
          Vec<Acc<T>> rows[width];
          for (int k = 0; k < width; k++) {
            const T* row = from + (k0 + k) * columns + e;
            rows[k] = k0 + k >= count ? Vec<Acc<T>>(Acc<T>(0)) : rest < width ? load_partial(row, rest) : load(row);
          }
          transpose(rows);
          for (int64_t j = 0; j < smaller(width, rest); j++) {
            Acc<T>* to = out + i * panel + (rs * b.channels + c) * b.block + k0;
            b.block < width ? store_partial(to, rows[j], b.block) : store(to, rows[j]);
            if (++rs == window) rs = 0, c++;
          }
        }
      }
    });
    if constexpr (dtype_of<T> == DType::bf16)
      if (multiplies_pairs(p)) {
        const int64_t steps = b.channels / 2, size = packed_size<float>(steps, b.out_channels);
        float* pairs = reinterpret_cast<float*>(static_cast<char*>(packed) + blocks_bytes(p));
        for (int64_t g = 0; g < p.groups; g++)
          pack_pair_panels(w + g * b.out_channels * b.channels, b.channels, b.out_channels, b.channels, pairs + g * size,
                           steps * kPanel<float>);
      }
  });
}

// How sums come into the output: its lines, which are not read, are likely in a core's own cache where it is small; those of a
// larger one are prefetched, or go past the caches where it is large and they are stored as a whole; or sums are added to what is
// there. In bytes of output (docs/decisions/direct.md); kLargeFromImages is of layers of up to four channels.
enum class Lines { cached, prefetched, past_caches, added_to };
constexpr int64_t kPrefetchedFrom = 256 << 10, kLargeFrom = 4 << 20, kLargeFromImages = 3 << 20;

// Kernel positions and channels that a tile adds up, with the strides from one to the next; how many tiles follow each other in
// the row, and how many blocks of output channels each of them has, which start from values `start_block` apart; how far behind
// its own pixels those lie that a tile prefetches, which others need next (0: none). `spread`: a vector of a pixel's channels
// holds those of several groups, `channels` each.
struct Span {
  int64_t rows, columns, channels;
  int64_t x_row, x_column, x_channel, x_pixel;
  int64_t w_row, w_column, w_channel, w_block;
  int64_t tiles = 1, blocks = 1, start_block = 0, ahead = 0;
  Lines lines = Lines::cached;
  bool spread = false;
  // What is applied in registers, where a tile is finished at once; the residual, laid out as the output, lies so many bytes
  // behind it (0: none): one more pointer would have no register.
  Activation activation = Activation::none;
  int64_t residual_behind = 0;
};
template <class A>
constexpr A kZeros[2 * Vec<A>::width] = {};

// tile[j][0 .. v vectors) = start + sum over the span of x[j] * w, for n pixels. No loop of the span is empty, and nothing else
// needs addresses here: otherwise the compiler keeps a second copy of the sums on the stack. The loop over tiles is in here
// because few channels make short tiles: found one by one, they take a third longer. `finished`: with the residual and the
// activation, in registers; a form of its own, since what it adds costs long products 5 % in their inner loop.
template <class A, int n, int v, bool spread = false, bool finished = false>
[[gnu::noinline]] void accumulate(const A* x, const A* w, A* tile, int64_t tile_pixel, const A* start, const Span& span) {
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
    const A *wb = w, *from = start;
    A* to = tile;
    do {
      Vec<A> first[v], sum[n][v];
#pragma GCC unroll 2
      for (int q = 0; q < v; q++) first[q] = load(from + q * width);
#pragma GCC unroll 16
      for (int j = 0; j < n; j++)
#pragma GCC unroll 2
        for (int q = 0; q < v; q++) sum[j][q] = first[q];
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
      const Apart<A, n> rows(to, tile_pixel);
      auto each = [&](const auto& put) __attribute__((always_inline)) {
#pragma GCC unroll 16
        for (int j = 0; j < n; j++)
#pragma GCC unroll 2
          for (int q = 0; q < v; q++) put(rows[j] + q * width, sum[j][q]);
      };
      if constexpr (finished)
        with_registers(
            span.activation, span.residual_behind != 0, [&]<Activation activation, bool added>() __attribute__((always_inline)) {
              each([&](A * p, Vec<A> s) __attribute__((always_inline)) {
                if constexpr (added)
                  s += load(reinterpret_cast<const A*>(reinterpret_cast<const char*>(p) + span.residual_behind));
                store(p, activate_inline(activation, s));
              });
            });
      else if (span.lines == Lines::past_caches)
        each([](A* p, Vec<A> s) { store_streaming(p, s); });
      else if (span.lines == Lines::added_to)
        each([](A* p, Vec<A> s) { store(p, load(p) + s); });
      else
        each([](A* p, Vec<A> s) { store(p, s); });
      wb += span.w_block, from += span.start_block, to += v * width, prefetched += next_column * span.columns;
    } while (--blocks);
    x += n * x_pixel, tile += n * tile_pixel;
  } while (--tiles);
}
template <int n, bool finished = false, class A>
AI3_INLINE void accumulate(int64_t pixels, bool two, const A* x, const A* w, A* tile, int64_t tile_pixel, const A* start,
                           const Span& span) {
  if (pixels == n)
    (two ? accumulate<A, n, 2, false, finished>
     : !finished && AI3_VECTOR_BYTES > 16 && span.spread
         ? accumulate<A, n, 1, AI3_VECTOR_BYTES >= 32>
         : accumulate<A, n, 1, false, finished>)(x, w, tile, tile_pixel, start, span);
  else if constexpr (n > 1)
    accumulate<n - 1, finished>(pixels, two, x, w, tile, tile_pixel, start, span);
}

// The same for an input that must be widened or has a prologue: the tile's part of it goes through a small buffer.
template <class T>
void accumulate_staged(int64_t pixels, bool two, const T* x, const Acc<T>* w, Acc<T>* tile, int64_t tile_pixel,
                       const Acc<T>* start, const Span& span, const Prologue<Acc<T>>& prologue) {
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
        accumulate<kPixels>(pixels, two, stage, w + r * span.w_row + s * span.w_column + c0 * span.w_channel, tile, tile_pixel,
                            start, part);
        lines = Lines::added_to, start = kZeros<A>;
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
      for (int j = 0; j < width; j++) rows[j] = j < columns ? load(tile + (j0 + j) * tile_pixel + k0) : Vec<A>(A(0));
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

// A 1x1 kernel with stride 1 sees no rows: pixels are regrouped into rows of eight tiles, over the whole batch where images
// follow each other pixel by pixel, as in NHWC; for more than two threads into rows of about equal length and, where there are
// few blocks of output channels, shorter ones.
Conv2dProblem regrouped(Conv2dProblem p, int64_t blocks) {
  if (!is_pointwise(p)) return p;
  int64_t pixels = p.out_height * p.out_width;
  if (p.x_stride.n == pixels * p.x_stride.w && p.y_stride.n == pixels * p.y_stride.w) pixels *= p.batch, p.batch = 1;
  int64_t width = smaller(pixels, 8 * kPixels);
  if (p.threads > 2 && pixels > 0) {
    const int64_t wanted = smaller(ceil_div(4 * p.threads, blocks), pixels / kPixels);
    width = ceil_div(pixels, larger(ceil_div(pixels, width), wanted));
  }
  p.out_width = p.in_width = width;
  p.out_height = p.in_height = ceil_div(pixels, p.out_width);
  p.x_stride.h = p.out_width * p.x_stride.w, p.y_stride.h = p.out_width * p.y_stride.w;
  return p;
}

// Rows of pixels with a prologue. A slab of them at a time, and a part of its channels, goes through a buffer in the L1 cache. In
// the meantime the first one prefetches the panels, the others the slab after them.
template <class T>
struct PrologueRows {
  const T* data;
  int64_t stride;
  Prologue<T> prologue;
  AI3_INLINE PrologueRows from(int64_t row) const { return {data + row * stride, stride, prologue}; }
};
template <class T>
void gemm_block(const PrologueRows<T>& a, int64_t rows, const T* panels, int64_t columns, int64_t k, const Output<T>& out) {
  constexpr int64_t P = kPanel<T>, kStep = P * static_cast<int64_t>(sizeof(T)), kAhead = 4096;
  constexpr int64_t kApart = kStageSpan + 16;  // so that rows do not collide
  if (rows <= 0 || columns <= 0) return;
  alignas(64) T stage[kRows * kApart];
  const int64_t slabs = ceil_div(rows, kRows), parts = ceil_div(k, kStageSpan), panel_total = ceil_div(columns, P);
  const int64_t share_bytes = kRows * a.stride * static_cast<int64_t>(sizeof(T)) / (parts * panel_total);
  for (int64_t s = 0; s < slabs; s++) {
    const Share r = share(rows, slabs, s);
    const char* next = reinterpret_cast<const char*>(a.data + (s + 1 < slabs ? r.end : r.begin) * a.stride);
    for (int64_t i = 0; i < parts; i++) {
      const Share c = share(k, parts, i);
      const int64_t count = c.end - c.begin;
      for (int64_t j = r.begin; j < r.end; j++)
        copy_channels(a.prologue.from(c.begin), a.data + j * a.stride + c.begin, count, stage + (j - r.begin) * kApart);
      for (int64_t q = 0; q < panel_total; q++, next += share_bytes) {
        const T* panel = panels + (q * k + c.begin) * P;
        multiply_slab<T>(StridedRows<T>{stage, kApart}, r.end - r.begin, panel, smaller(P, columns - q * P), count,
                         out.from(r.begin, q * P).part(i == 0, i == parts - 1),
                         s == 0 ? Next{reinterpret_cast<const char*>(panel) + kAhead, kStep} : Next{next, share_bytes / count});
      }
    }
  }
}

// The same as packed products, one for each group: rows_of(group) are the pixels, `steps` the elements or pairs of their
// channels, `preparation` what a prologue costs (as gemm_grid counts it).
template <class T, class RowsOf>
void multiply_pixels(const Conv2dProblem& p, const Blocking& b, const Buffers& m, const Acc<T>* panels, int64_t steps,
                     const RowsOf& rows_of, double preparation = 0) {
  using A = Acc<T>;
  const int64_t pixels = p.batch * p.out_height * p.out_width;
  const Grid grid =
      gemm_grid<A>(p.threads, p.groups, ceil_div(pixels, kRows), kRows, panel_count<A>(b.out_channels), steps, preparation);
  auto multiply_task = [&](int64_t g, int64_t i, int64_t j, int) {
    const Share rows = row_share(pixels, grid, i), filters = column_share<A>(b.out_channels, grid.streamed, j);
    Output<T> y{static_cast<T*>(m.output), p.y_stride.w};
    y.set_epilogue(p.activation, m);
    gemm_block<T>(rows_of(g).from(rows.begin), rows.end - rows.begin,
                  panels + g * packed_size<A>(steps, b.out_channels) + filters.begin * steps, filters.end - filters.begin, steps,
                  y.from(rows.begin, g * b.out_channels + filters.begin));
  };
  for_grid(p.threads, p.groups, grid, multiply_task, product_size<A>(pixels, b.out_channels, steps, grid));
}
// Returns false where the layout or the type is none that the packed product takes.
template <class T>
bool multiply_pixels(const Conv2dProblem& p, const Blocking& b, const Buffers& m) {
  const int64_t pixels = p.out_height * p.out_width, stride = p.x_stride.w;
  if (!is_pointwise(p) || p.x_stride.c != 1 || p.y_stride.c != 1 || pixels == 1) return false;
  if (p.x_stride.n != pixels * stride || p.y_stride.n != pixels * p.y_stride.w) return false;
  const T* x = static_cast<const T*>(m.input);
  [[maybe_unused]] const Prologue<Acc<T>> prologue(p, m);
  if constexpr (dtype_of<T> == DType::bf16) {
    if (!multiplies_pairs(p) || prologue) return false;
    const float* pairs = reinterpret_cast<const float*>(static_cast<const char*>(m.weight) + blocks_bytes(p));
    multiply_pixels<T>(p, b, m, pairs, b.channels / 2, [&](int64_t g) { return PairRows{x + g * b.channels, stride}; });
    return true;
  } else if constexpr (same<T, Acc<T>>) {
    const bool few = b.channels <= kFewChannels && b.out_channels % b.block == 0;
    if (b.block != kPanel<T> || (few && !prologue)) return false;
    if (prologue)
      multiply_pixels<T>(
          p, b, m, static_cast<const T*>(m.weight), b.channels,
          [&](int64_t g) {
            return PrologueRows<T>{x + g * b.channels, stride, prologue.from(g * b.channels)};
          },
          .25);
    else
      multiply_pixels<T>(p, b, m, static_cast<const T*>(m.weight), b.channels, [&](int64_t g) {
        return StridedRows<T>{x + g * b.channels, stride};
      });
    return true;
  }
  return false;
}

template <class T>
void conv2d_direct(const Conv2dProblem& problem, const Buffers& m, Workspace&) {
  using A = Acc<T>;
  constexpr int width = Vec<A>::width;
  const T *x = static_cast<const T*>(m.input), *residual = static_cast<const T*>(m.residual);
  const Channels<T> of_channels{static_cast<const T*>(m.bias), static_cast<const A*>(m.slope)};
  const A* w = static_cast<const A*>(m.weight);
  T* y = static_cast<T*>(m.output);
  const Blocking b(problem);
  const Prologue<A> prologue(problem, m);
  if (multiply_pixels<T>(problem, b, m)) return;
  const Conv2dProblem p = regrouped(problem, larger(1, b.blocks));
  const int64_t all_pixels = problem.out_height * problem.out_width * (problem.batch / p.batch);  // of what is one image in p
  const bool in_place = same<T, A> && p.y_stride.c == 1 && residual != y;  // sums would go over a residual that is the output
  const bool needs_finish = residual || p.activation != Activation::none;
  Span whole{};
  whole.rows = p.kernel_height, whole.columns = p.kernel_width, whole.channels = b.channels;
  whole.x_row = p.dilation_h * p.x_stride.h, whole.x_column = p.dilation_w * p.x_stride.w;
  whole.x_channel = p.x_stride.c, whole.x_pixel = p.stride_w * p.x_stride.w;
  whole.w_channel = b.block, whole.w_column = b.channels * b.block, whole.w_row = p.kernel_width * whole.w_column;
  const int64_t panel = whole.w_block = p.kernel_height * whole.w_row;
  const bool spread = whole.spread = b.spread(p);
  const int64_t groups = spread ? b.groups : p.groups, channels = p.in_channels / groups, filters = p.out_channels / groups;
  auto weights_of = [&](int64_t group, int64_t block) {
    return w +
           (spread || b.joined == 1 ? (group * b.blocks + block) * panel : group / b.joined * panel + group % b.joined * filters);
  };
  // Fewer pixels of a tile where they share one set of the first-level cache.
  auto tile_size = [&](int64_t x_pixel) {
    return same<T, A> && p.x_stride.c == 1 && rows_collide<T>(x_pixel) ? kPixels / 2 : kPixels;
  };
  const int64_t tile_pixels = tile_size(whole.x_pixel);

  // Neighbouring columns' channels are one run of memory in a dense NHWC image: the first layers' few channels get long loops.
  auto joined = [](Span span) {
    if (span.x_column == span.channels * span.x_channel && !span.spread) span.channels *= span.columns, span.columns = 1;
    return span;
  };
  // Pixels whose window lies inside the image's columns are most of a row, and where sums need no buffer and each block is of
  // whole vectors, their tiles differ in their address alone. The few pixels beside them are tiles of their own then, which go
  // down the rows; of a narrow row they are too many, and cost more than is saved where there are many products.
  constexpr int64_t kFewProducts = 512;
  const bool few = p.kernel_height * p.kernel_width * b.channels <= kFewProducts;
  const bool pays = p.pad_w == 0 || p.out_width > kPixels || few;
  const bool alike = pays && in_place && !prologue && b.channels > 0 && b.block % width == 0 && filters % b.block == 0;
  const Range interior = inside(-p.pad_w, p.stride_w, p.in_width - (p.kernel_width - 1) * p.dilation_w, alike ? p.out_width : 0);

  const int64_t size = static_cast<int64_t>(sizeof(T)), written = p.batch * p.out_height * p.y_stride.h * size;
  const bool whole_lines = has_whole_lines<T>(p.y_stride, y) && b.block * size % 64 == 0 && !needs_finish;
  const Lines lines = whole_lines && written >= (p.in_channels <= 4 ? kLargeFromImages : kLargeFrom) ? Lines::past_caches
                      : written >= kPrefetchedFrom                                                   ? Lines::prefetched
                                                                                                     : Lines::cached;

  // One tile: output pixels [column, column + pixels) of a row by `count` output channels, whose sums start from the bias.
  auto tile = [&](const T* xi, T* yi, const T* zi, int64_t row, int64_t column, int64_t pixels, const A* weights,
                  const Channels<T>& of, int64_t count, const Prologue<A>& f) {
    alignas(64) A buffer[kPixels * 2 * width], start[2 * width];
    const bool direct = in_place && count % width == 0, two = count > width;
    const A* first = start;
    const T* const bi = of.bias;
    if constexpr (same<T, A>)
      if (bi && count % width == 0) first = bi;
    if (first == start)
      for (int64_t q = 0; q < count; q += width)
        store(start + q, !bi ? Vec<A>(A(0)) : count - q < width ? load_partial(bi + q, count - q) : load(bi + q));
    T* out = yi + row * p.y_stride.h + column * p.y_stride.w;
    A* sums = buffer;
    int64_t sums_pixel = 2 * width;
    if constexpr (same<T, A>)
      if (direct) {
        sums = out, sums_pixel = p.y_stride.w;
        for (int64_t j = 0; j < pixels; j++)  // lines that are only written arrive in the meantime
          __builtin_prefetch(out + j * sums_pixel, 1), __builtin_prefetch(out + j * sums_pixel + count - 1, 1);
      }
    // The part of the kernel that lies inside the image: rows `valid` for all pixels; columns differ from pixel to pixel.
    const int64_t top = row * p.stride_h - p.pad_h, left = column * p.stride_w - p.pad_w;
    const Range valid = inside(top, p.dilation_h, p.in_height, p.kernel_height);
    bool started = false;
    auto fill = [&] {
      for (int64_t j = 0; j < pixels; j++)
        for (int64_t q = 0; q < count; q += width) store(sums + j * sums_pixel + q, load(first + q));
      started = true;
    };
    for (int64_t s = 0; s < p.kernel_width && valid.size() > 0 && b.channels > 0;) {
      // The pixels that see kernel column s inside the image see the following columns there too, up to `end`.
      auto seeing = [&](int64_t column_s) { return inside(left + column_s * p.dilation_w, p.stride_w, p.in_width, pixels); };
      const Range seen = seeing(s);
      int64_t end = s + 1;
      for (Range next; end < p.kernel_width; end++)
        if (next = seeing(end); next.begin != seen.begin || next.end != seen.end) break;
      if (seen.size() > 0) {
        const bool full = seen.size() == pixels;
        if (!started && !full) fill();
        Span span = whole;
        span.rows = valid.size(), span.columns = end - s;
        if (!f) span = joined(span);
        const T* from = xi + (top + valid.begin * p.dilation_h) * p.x_stride.h +
                        (left + s * p.dilation_w + seen.begin * p.stride_w) * p.x_stride.w;
        const A* panel_part = weights + valid.begin * span.w_row + s * span.w_column;
        A* const into = sums + seen.begin * sums_pixel;
        const A* from_sums = started ? kZeros<A> : first;
        if (started) span.lines = Lines::added_to;
        if (!same<T, A> || f)
          accumulate_staged<T>(seen.size(), two, from, panel_part, into, sums_pixel, from_sums, span, f);
        else if constexpr (same<T, A>)
          accumulate<kPixels>(seen.size(), two, from, panel_part, into, sums_pixel, from_sums, span);
        started = true;
      }
      s = end;
    }
    if (!started) fill();
    if (!direct || needs_finish) finish<T>(p, sums, sums_pixel, pixels, count, of.slope, zi ? zi + (out - yi) : nullptr, out);
  };

  // `count` pixels by `blocks` blocks, in tiles that differ in their address alone: pixels are span.x_pixel apart in the image
  // and q.y_stride.w in the output.
  auto alike_tiles = [&](const Conv2dProblem& q, Span span, int64_t count, const T* from, T* out, const T* z, const A* weights,
                         const Channels<T>& of, int64_t blocks) {
    if constexpr (same<T, A>) {
      span = joined(span);
      span.blocks = blocks, span.lines = lines;
      if (of.bias) span.start_block = b.block;
      const bool finished = few && !spread && needs_finish && is_applied_in_registers(q.activation, z);
      if (finished) {
        span.activation = q.activation;
        if (z) span.residual_behind = reinterpret_cast<const char*>(z) - reinterpret_cast<const char*>(out);
      }
      int64_t tiles = ceil_div(count, tile_size(span.x_pixel));
      while (tiles > 0) {  // first the wider tiles
        const int64_t pixels = ceil_div(count, tiles), wider = count - (pixels - 1) * tiles;
        span.tiles = finished || !needs_finish ? wider : 1;
        if (is_pointwise(problem)) span.ahead = pixels * span.x_pixel;  // the next tile's
        const A* const starts = of.bias ? of.bias : kZeros<A>;
        if (finished)
          accumulate<kPixels, true>(pixels, b.block > width, from, weights, out, q.y_stride.w, starts, span);
        else
          accumulate<kPixels>(pixels, b.block > width, from, weights, out, q.y_stride.w, starts, span);
        if (needs_finish && !finished) finish<T>(q, out, q.y_stride.w, pixels, blocks * b.block, of.slope, z, out);
        const int64_t done = span.tiles * pixels;
        tiles -= span.tiles, count -= done, from += done * span.x_pixel, out += done * q.y_stride.w;
        if (z) z += done * q.y_stride.w;
      }
    }
  };
  // Those of a row's columns, which see the kernel's rows `valid`.
  auto row_tiles = [&](const T* xi, T* yi, const T* zi, int64_t row, Range valid, Range columns, const A* weights,
                       const Channels<T>& of, int64_t blocks, bool prefetches) {
    Span span = whole;
    span.rows = valid.size(), span.ahead = prefetches ? p.stride_h * p.x_stride.h : 0;
    const T* from = xi + (row * p.stride_h - p.pad_h + valid.begin * p.dilation_h) * p.x_stride.h +
                    (columns.begin * p.stride_w - p.pad_w) * p.x_stride.w;
    const int64_t shift = row * p.y_stride.h + columns.begin * p.y_stride.w;
    alike_tiles(p, span, columns.size(), from, yi + shift, zi ? zi + shift : nullptr, weights + valid.begin * span.w_row, of,
                blocks);
  };

  // The columns beside the interior; whether each sees something of the image; and the rows that see all of the kernel's.
  auto for_edges = [&](const auto& body) {
    for (int64_t column = 0; column < interior.begin; column++) body(column);
    for (int64_t column = interior.end; column < p.out_width; column++) body(column);
  };
  auto seen_from = [&](int64_t column) {
    return inside(column * p.stride_w - p.pad_w, p.dilation_w, p.in_width, p.kernel_width);
  };
  bool edges_alike = interior.size() > 0;
  if (edges_alike) for_edges([&](int64_t column) { edges_alike &= seen_from(column).size() > 0; });
  const Range whole_rows = inside(-p.pad_h, p.stride_h, p.in_height - (p.kernel_height - 1) * p.dilation_h, p.out_height);
  // Such a column's pixels in some of those rows: tiles go down.
  Conv2dProblem turned = p;
  turned.y_stride.w = p.y_stride.h;
  auto column_tiles = [&](const T* xi, T* yi, const T* zi, Range rows, int64_t column, const A* weights, const Channels<T>& of,
                          int64_t blocks) {
    const Range seen = seen_from(column);
    Span span = whole;
    span.columns = seen.size(), span.x_pixel = p.stride_h * p.x_stride.h;
    const T* from = xi + (rows.begin * p.stride_h - p.pad_h) * p.x_stride.h +
                    (column * p.stride_w - p.pad_w + seen.begin * p.dilation_w) * p.x_stride.w;
    const int64_t shift = rows.begin * p.y_stride.h + column * p.y_stride.w;
    alike_tiles(turned, span, rows.size(), from, yi + shift, zi ? zi + shift : nullptr, weights + seen.begin * span.w_column, of,
                blocks);
  };

  // Where the weights fit the second-level cache, tiles go through all blocks of output channels, so that the output is written
  // from begin to end; otherwise a task's rows of input and output stay there while blocks pass over them.
  constexpr int64_t kRowBytes = 512 << 10, kWeightBytes = 384 << 10;
  const bool weights_stay = b.blocks * panel * static_cast<int64_t>(sizeof(A)) <= kWeightBytes;
  const int64_t row_elements = smaller(p.stride_h, p.in_height) * p.in_width * channels + p.out_width * filters,
                images = p.batch * groups;
  const bool split_rows = images < p.threads && b.blocks < 4 * p.threads;
  const int64_t fitting =
      weights_stay ? images * p.out_height / (4 * p.threads) : kRowBytes / (row_elements * static_cast<int64_t>(sizeof(T)));
  const int64_t rows = larger(1, smaller(fitting, split_rows ? ceil_div(p.out_height, p.threads) : p.out_height));
  const int64_t least = ceil_div(p.out_height, rows);
  const bool uneven = images % p.threads != 0 && least > 1;
  const int64_t chunks = uneven ? smaller(round_up(least, p.threads), p.out_height) : least, tasks = images * chunks;
  // Smaller tasks where chunks differ by a row, so that threads that are done find something to take over.
  const int64_t each = p.threads > 2 && p.out_height % chunks != 0 ? 8 : 4;
  const int64_t most = p.threads == 1 ? 1 : smaller(b.blocks, ceil_div(each * p.threads, tasks)),
                blocks = ceil_div(b.blocks, most), splits = p.threads > 2 ? ceil_div(b.blocks, blocks) : most;
  const int64_t pass = weights_stay ? blocks : 1;
  const double work = static_cast<double>(all_pixels * p.batch) * static_cast<double>(p.out_channels) *
                      static_cast<double>(whole.rows * whole.columns * b.channels);
  auto task = [&](int64_t i, int) {
    const int64_t first = i % splits * blocks, last = smaller(b.blocks, first + blocks), image = i / splits / chunks;
    const Share part = share(p.out_height, chunks, i / splits % chunks);
    const int64_t n = image / groups, g = image % groups;
    const T* xi = x + n * p.x_stride.n + g * channels * p.x_stride.c;
    const Range edge_rows =
        edges_alike ? Range{larger(part.begin, whole_rows.begin), smaller(part.end, whole_rows.end)} : Range{0, 0};
    auto at = [&](int64_t k) { return n * p.y_stride.n + k * p.y_stride.c; };
    for (int64_t block = first; block < last; block += pass) {
      const int64_t end = smaller(last, block + pass), k = g * filters + block * b.block;
      const Channels<T> ck = of_channels.from(k);
      const T* const zk = residual ? residual + at(k) : nullptr;
      const A* const wk = weights_of(g, block);
      for (int64_t row = part.begin; row < part.end; row++) {
        const int64_t columns = smaller(p.out_width, all_pixels - row * p.out_width);
        const Range valid = inside(row * p.stride_h - p.pad_h, p.dilation_h, p.in_height, p.kernel_height);
        const int64_t quick_end = valid.size() > 0 ? smaller(interior.end, columns) : 0,
                      quick_begin = smaller(interior.begin, quick_end);
        auto tiles_of = [&](int64_t from, int64_t to) {
          const int64_t tiles = ceil_div(to - from, tile_pixels);
          for (int64_t t = 0; t < tiles; t++) {
            const Share some = share(to - from, tiles, t);
            const int64_t column = from + some.begin, pixels = some.end - some.begin;
            for (int64_t kb = block; kb < end; kb++) {
              const int64_t kt = g * filters + kb * b.block;
              tile(xi, y + at(kt), residual ? residual + at(kt) : nullptr, row, column, pixels, weights_of(g, kb),
                   of_channels.from(kt), smaller(b.block, filters - kb * b.block), prologue.from(g * channels));
            }
          }
        };
        const bool edges = row < edge_rows.begin || row >= edge_rows.end;
        if (edges) tiles_of(0, quick_begin);
        if (quick_begin < quick_end)
          row_tiles(xi, y + at(k), zk, row, valid, {quick_begin, quick_end}, wk, ck, end - block, block == first);
        if (edges) tiles_of(quick_end, columns);
      }
      if (edge_rows.size() > 0)
        for_edges([&](int64_t column) { column_tiles(xi, y + at(k), zk, edge_rows, column, wk, ck, end - block); });
    }
    if (lines == Lines::past_caches) finish_streaming();
  };
  parallel_for(work < 1e5 ? 1 : p.threads, tasks * splits, task, [&](int64_t i) {
    const int64_t first = i % splits * blocks, last = larger(first, smaller(b.blocks, first + blocks));
    const Share part = share(p.out_height, chunks, i / splits % chunks);
    const int64_t pixels = smaller(part.end * p.out_width, all_pixels) - part.begin * p.out_width;
    return static_cast<double>(pixels * (last - first) * ceil_div(b.block, width) * whole.rows * whole.columns * b.channels);
  });
}

// Groups that fill vectors (joined_groups.h) have gradients of their own in NHWC; dX with a stride is PyTorch's, which beats the
// patches of so few channels.
GradientNames gradients(const Conv2dProblem& p) {
  if (!groups_fill_vectors(p) || multiplies_pairs(p) || p.x_stride.c != 1 || p.y_stride.c != 1) return by_patches(p);
  const Conv2dProblem t = transposed(p);
  const bool convolution = p.stride_h == 1 && p.stride_w == 1 && t.pad_h >= 0 && t.pad_w >= 0;
  return {convolution ? "direct" : nullptr, "direct"};
}
int64_t backward_workspace(const Conv2dProblem& p, const GradientBuffers& m) {
  return m.grad_input ? workspace_bytes<char>(packed_bytes(transposed(p))) : 0;
}
void backward(const Conv2dProblem& p, const GradientBuffers& m, Workspace& workspace) {
  with_type(p.dtype, [&]<class T>() {
    const T *gy = static_cast<const T*>(m.grad_output), *x = static_cast<const T*>(m.input);
    if (m.grad_input) {
      const Conv2dProblem t = transposed(p);
      Acc<T>* packed = workspace.take<Acc<T>>(packed_bytes(t) / static_cast<int64_t>(sizeof(Acc<T>)));
      pack_joined_turned(p, static_cast<const T*>(m.weight), packed);
      conv2d_direct<T>(t, {gy, packed, nullptr, nullptr, m.grad_input}, workspace);
    }
    if constexpr (AI3_VECTOR_BYTES > 16)
      if (m.grad_weight)
        joined_weight_gradient_of<T>(p.in_channels / p.groups, p, gy, x, static_cast<T*>(m.grad_weight),
                                     static_cast<T*>(m.grad_bias));
  });
}

Cost cost(const Conv2dProblem& p) {
  const Blocking b(p);
  const bool spread = b.spread(p);
  const int64_t lanes = spread ? p.out_channels : p.groups * round_up(p.out_channels / p.groups, lanes_of(p));
  const double pixels = static_cast<double>(p.batch) * static_cast<double>(p.out_height) * static_cast<double>(p.out_width);
  const double weights = static_cast<double>(lanes) * static_cast<double>(b.channels * p.kernel_height * p.kernel_width);
  const double image =
      static_cast<double>(p.batch * p.in_channels) * static_cast<double>(p.in_height) * static_cast<double>(p.in_width);
  const double moved = image + static_cast<double>(p.out_channels) * pixels + weights;
  return {2 * pixels * weights, moved * static_cast<double>(size_of(p.dtype)), spread ? .4 : .85};
}

AI3_ALGORITHM(conv2d, direct, .epilogue = true, .cost = cost, .packed_bytes = packed_bytes, .pack = pack, .gradients = gradients,
              .backward = backward, .backward_workspace = backward_workspace, .prologue = true, .sliced = true)

}  // namespace

const Algorithm<Conv2dProblem>& conv2d_direct_record() { return conv2d_direct_algorithm; }

}  // namespace ai3::inline AI3_LEVEL

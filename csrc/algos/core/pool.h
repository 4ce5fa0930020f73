// Pooling over windows that are a product of a range of rows and a range of columns. Lanes are channels: of NHWC as it lies, of
// NCHW in tiles that are transposed first. Where channels are few or windows large or far apart, NCHW's lanes are columns; where
// the order does not matter, the rows of a window are then reduced first, for all columns at once, then the columns.
#pragma once
#include "moments.h"
#include "planes.h"
#include "pool_problem.h"
#include "streaming.h"

namespace ai3::inline AI3_LEVEL {

// What a window covers along one axis: `count` positions, `step` apart, and how many they count as in a mean.
struct Window {
  int64_t begin, count, step, extent;
  AI3_INLINE int64_t operator[](int64_t i) const { return begin + i * step; }
};
struct PoolAxis {
  int64_t in, out, kernel, stride, pad, dilation;
  bool adaptive, count_pad;

  AI3_INLINE Window at(int64_t o) const {
    if (adaptive) {
      const int64_t begin = o * in / out, count = ceil_div((o + 1) * in, out) - begin;
      return {begin, count, 1, count};
    }
    const int64_t begin = o * stride - pad;
    const Range valid = inside(begin, dilation, in, kernel);
    return {begin + valid.begin * dilation, valid.size(), dilation, count_pad ? smaller(kernel, in + pad - begin) : valid.size()};
  }
};
// What outputs [begin, end) of an axis see of the input.
AI3_INLINE Range pool_reach(const PoolAxis& a, int64_t begin, int64_t end) {
  if (a.adaptive) return {begin * a.in / a.out, ceil_div(end * a.in, a.out)};
  const int64_t first = larger(0, begin * a.stride - a.pad);
  return {first, larger(first, smaller(a.in, (end - 1) * a.stride - a.pad + a.dilation * (a.kernel - 1) + 1))};
}
AI3_INLINE PoolAxis pool_rows(const Pool2dProblem& p, bool adaptive) {
  return {p.in_height, p.out_height, p.kernel_height, p.stride_h, p.pad_h, p.dilation_h, adaptive, p.count_include_pad};
}
AI3_INLINE PoolAxis pool_columns(const Pool2dProblem& p, bool adaptive) {
  return {p.in_width, p.out_width, p.kernel_width, p.stride_w, p.pad_w, p.dilation_w, adaptive, p.count_include_pad};
}

struct Maximum {
  static constexpr bool ordered = true;  // of +0 and -0 the first one in the window stays, as in ATen
  template <class A>
  AI3_INLINE static Vec<A> start() {
    return static_cast<A>(-__builtin_inf());
  }
  // NaN wins, else the first of equal values.
  template <class A>
  AI3_INLINE static Vec<A> add(Vec<A> best, Vec<A> value) {
    return max_nan(value, best);
  }
  template <class A>
  AI3_INLINE static Vec<A> finish(Vec<A> best, Vec<A>) {
    return best;
  }
};
struct Mean {
  static constexpr bool ordered = false;
  template <class A>
  AI3_INLINE static Vec<A> start() {
    return A(0);
  }
  template <class A>
  AI3_INLINE static Vec<A> add(Vec<A> sum, Vec<A> value) {
    return sum + value;
  }
  template <class A>
  AI3_INLINE static Vec<A> finish(Vec<A> sum, Vec<A> divisor) {
    return sum / divisor;
  }
};

namespace detail {

inline constexpr int kPoolVectors = 4;       // NHWC: vectors of channels that pass over a window together
inline constexpr int64_t kPoolAhead = 4096;  // NHWC: bytes from a vector to the one that is prefetched
inline constexpr int64_t kPoolSpan = 1024;   // NCHW: columns of a window's reduced rows that are held at a time

// NHWC: whether the output goes past the caches, in whole lines; how many rows and columns of a window are new to it, and are
// prefetched: 0 where the input does not come from memory.
struct Traffic {
  bool past_caches;
  int64_t new_rows, new_columns;
};

template <class A>
AI3_INLINE A pool_divisor(const Pool2dProblem& p, Window rows, Window columns) {
  return static_cast<A>(p.divisor ? p.divisor : rows.extent * columns.extent);
}

// NHWC: one window, `vectors` vectors of channels, the last one with `lanes` of them.
template <class Reduce, int vectors, class T>
AI3_INLINE void pool_channels(const Pool2dProblem& p, Window rows, Window columns, const T* x, T* y, int64_t lanes,
                              Traffic traffic) {
  using A = Acc<T>;
  constexpr int width = Vec<A>::width, last = vectors - 1;
  const bool whole = lanes >= width;
  Vec<A> result[vectors];
#pragma GCC unroll 4
  for (int q = 0; q < vectors; q++) result[q] = Reduce::template start<A>();
  for (int64_t r = 0; r < rows.count; r++)
    for (int64_t s = 0; s < columns.count; s++) {
      const T* from = x + rows[r] * p.x_stride.h + columns[s] * p.x_stride.w;
      if (r >= rows.count - traffic.new_rows && s >= columns.count - traffic.new_columns)
        for (int q = 0; q < vectors; q++) __builtin_prefetch(reinterpret_cast<const char*>(from + q * width) + kPoolAhead);
#pragma GCC unroll 4
      for (int q = 0; q < vectors; q++)
        result[q] = Reduce::add(result[q], q < last || whole ? load(from + q * width) : load_partial(from + q * width, lanes));
    }
  const Vec<A> divisor = pool_divisor<A>(p, rows, columns);
#pragma GCC unroll 4
  for (int q = 0; q < vectors; q++) {
    const Vec<A> v = Reduce::finish(result[q], divisor);
    if (traffic.past_caches)
      store_streaming(y + q * width, v);
    else
      q < last || whole ? store(y + q * width, v) : store_partial(y + q * width, v, lanes);
  }
}

// `count` channels, `vectors` vectors at most, which pass over the window together: a chain of sums alone would wait for its
// last.
template <class Reduce, int vectors, class T>
AI3_INLINE void pool_window(const Pool2dProblem& p, Window rows, Window columns, const T* x, T* y, int64_t count,
                            Traffic traffic) {
  constexpr int64_t before = int64_t{vectors - 1} * Vec<Acc<T>>::width;
  if constexpr (vectors > 1)
    if (count <= before) return pool_window<Reduce, vectors - 1>(p, rows, columns, x, y, count, traffic);
  pool_channels<Reduce, vectors>(p, rows, columns, x, y, count - before, traffic);
}

// NCHW: reduced[i] = the window's rows at column first + i, for i in [0, count); what lies outside the image holds the start
// value.
template <class Reduce, class T>
AI3_INLINE void pool_rows_of(const Pool2dProblem& p, Window rows, const T* plane, int64_t first, int64_t count, Acc<T>* reduced) {
  using A = Acc<T>;
  constexpr int width = Vec<A>::width;
  const Range valid = inside(first, 1, p.in_width, count);
  const A outside = Reduce::template start<A>()[0];
  for (int64_t i = 0; i < valid.begin; i++) reduced[i] = outside;
  for (int64_t i = valid.end; i < count; i++) reduced[i] = outside;
  for (int64_t i = valid.begin; i < valid.end; i += width) {
    const int64_t lanes = smaller(width, valid.end - i);
    Vec<A> v = Reduce::template start<A>();
    for (int64_t r = 0; r < rows.count; r++) {
      const T* from = plane + rows[r] * p.x_stride.h + (first + i) * p.x_stride.w;
      v = Reduce::add(v, lanes == width ? load(from) : load_partial(from, lanes));
    }
    lanes == width ? store(reduced + i, v) : store_partial(reduced + i, v, lanes);
  }
}

// NCHW: tiles of `rows` x `columns` outputs of a vector of channels, which see kTilePixels pixels at most.
inline constexpr int64_t kTilePixels = 1024;
struct PoolTiles {
  int64_t rows = 0, columns = 0;
};
// None where most lanes would be empty, where one window is the image or so large that it is quicker reduced by rows, and where
// windows are so far apart that tiles are mostly what none sees.
AI3_INLINE PoolTiles pool_tiles(const Pool2dProblem& p, const PoolAxis& row_axis, const PoolAxis& column_axis, int64_t width) {
  constexpr int64_t kTaps = 64, kRows = 8, kUnseen = 4;
  if ((p.x_stride.c == 1 && p.y_stride.c == 1) || p.out_height < 1 || p.out_width < 1) return {};
  if (p.channels < width / 2 || p.x_stride.w != 1 || p.y_stride.w != 1) return {};
  auto steps = [](const PoolAxis& a) { return a.adaptive ? ceil_div(a.in, a.out) : a.stride; };
  auto extent = [&](const PoolAxis& a) {
    return a.adaptive ? steps(a) + 1 : smaller(a.dilation, kTilePixels) * (smaller(a.kernel, kTilePixels) - 1) + 1;
  };
  auto taps = [&](const PoolAxis& a) { return a.adaptive ? extent(a) : a.kernel; };
  const int64_t high = taps(row_axis), wide = taps(column_axis);
  if (high > kTaps || wide > kTaps || high * wide > kTaps || high * wide >= p.in_height * p.in_width) return {};
  if (steps(row_axis) * steps(column_axis) > kUnseen * high * wide) return {};
  // Outputs of an axis that see at most `most` positions.
  auto fitting = [&](const PoolAxis& a, int64_t most) {
    return extent(a) > most ? 0 : smaller(a.out, (most - extent(a)) / steps(a) + 1);
  };
  PoolTiles tiles;
  tiles.columns = fitting(column_axis, kTilePixels / larger(kRows, 2 * extent(row_axis)));
  if (tiles.columns > 0)
    tiles.rows = fitting(row_axis, kTilePixels / ((tiles.columns - 1) * steps(column_axis) + extent(column_axis)));
  return tiles.rows > 0 ? tiles : PoolTiles{};
}
// Elements of a thread's tiles: what is seen, then the outputs, which are no more.
template <class T>
constexpr int64_t tile_elements() {
  return 2 * kTilePixels * Vec<Acc<T>>::width;
}
template <class Reduce, class T>
void pool_by_tiles(const Pool2dProblem& p, const PoolAxis& row_axis, const PoolAxis& column_axis, PoolTiles tiles, int64_t taps,
                   const T* x, T* y, Workspace& workspace) {
  constexpr int64_t width = Vec<Acc<T>>::width, kGrain = 1 << 11, kOther = 4;
  T* const memory = workspace.take<T>(p.threads * tile_elements<T>());
  const int64_t vectors = ceil_div(p.channels, width), across = ceil_div(p.out_width, tiles.columns);
  // For each output: the vectors of its window, and as much as some more for transposing and storing.
  auto work = [&](int64_t rows) { return rows * tiles.columns * (taps + kOther); };
  // As many tiles as threads are worth it.
  const int64_t shares = smaller(p.threads, p.batch * vectors * across * work(p.out_height) / kGrain);
  while (tiles.rows > 1 && p.batch * vectors * across * ceil_div(p.out_height, tiles.rows) < shares)
    tiles.rows = ceil_div(tiles.rows, 2);
  const int64_t down = ceil_div(p.out_height, tiles.rows);
  auto tile = [&](int64_t i, T* in, T* out) {
    const int64_t c = i / across / down % vectors * width, n = i / across / down / vectors,
                  lanes = smaller(width, p.channels - c);
    const Range rows{i / across % down * tiles.rows, smaller(p.out_height, (i / across % down + 1) * tiles.rows)},
        columns{i % across * tiles.columns, smaller(p.out_width, (i % across + 1) * tiles.columns)};
    const Range seen_rows = pool_reach(row_axis, rows.begin, rows.end),
                seen = pool_reach(column_axis, columns.begin, columns.end);
    const T* const plane = x + n * p.x_stride.n + c * p.x_stride.c + seen.begin;
    each_piece(seen_rows.begin, seen_rows.end, seen.size(), p.x_stride.h, [&](int64_t row, int64_t elements) {
      to_lanes(plane + row * p.x_stride.h, p.x_stride.c, lanes, elements, in + (row - seen_rows.begin) * seen.size() * width,
               width);
    });
    Pool2dProblem of_tile = p;
    of_tile.x_stride = {0, 1, seen.size() * width, width};
    T* to = out;
    for (int64_t o = rows.begin; o < rows.end; o++) {
      Window down_window = row_axis.at(o);
      down_window.begin -= seen_rows.begin;
      for (int64_t q = columns.begin; q < columns.end; q++, to += width) {
        Window across_window = column_axis.at(q);
        across_window.begin -= seen.begin;
        pool_window<Reduce, 1>(of_tile, down_window, across_window, in, to, width, {});
      }
    }
    T* const output = y + n * p.y_stride.n + c * p.y_stride.c + columns.begin;
    each_piece(rows.begin, rows.end, columns.size(), p.y_stride.h, [&](int64_t row, int64_t elements) {
      to_planes(out + (row - rows.begin) * columns.size() * width, width, {0, lanes}, elements, output + row * p.y_stride.h,
                p.y_stride.c);
    });
  };
  parallel_ranges(
      p.threads, p.batch * vectors * down * across, ceil_div(kGrain, work(tiles.rows)),
      [&](int64_t begin, int64_t end, int thread) {
        T* const in = memory + thread * tile_elements<T>();
        for (int64_t i = begin; i < end; i++) tile(i, in, in + kTilePixels * width);
      },
      static_cast<double>(work(tiles.rows)));
}

// NCHW: one row of one output plane, value by value in the window's order.
template <class Reduce, class T>
void pool_plane_row_ordered(const Pool2dProblem& p, const PoolAxis& axis, Window rows, const T* plane, T* y) {
  using A = Acc<T>;
  constexpr int width = Vec<A>::width;
  for (int64_t o = 0; o < p.out_width; o += width) {
    const int64_t lanes = smaller(width, p.out_width - o), step = axis.stride * p.x_stride.w;
    Vec<A> v = Reduce::template start<A>();
    for (int64_t r = 0; r < rows.count; r++)
      for (int64_t s = 0; s < axis.kernel; s++) {
        const int64_t column = o * axis.stride - axis.pad + s * axis.dilation;
        const Range seen = inside(column, axis.stride, axis.in, lanes);
        const T* from = plane + rows[r] * p.x_stride.h + column * p.x_stride.w;
        if (seen.size() == width)
          v = Reduce::add(v, load_strided(from, step));
        else if (seen.size() > 0)
          v = select(seen, Reduce::add(v, load_strided(from, step, seen)), v);
      }
    lanes == width ? store(y + o, v) : store_partial(y + o, v, lanes);
  }
}

// NCHW: the mean of a plane's elements, which lie side by side: the only window of a global pooling.
template <class T>
T mean_of_plane(const Pool2dProblem& p, Window rows, Window columns, const T* plane) {
  using A = Acc<T>;
  constexpr int width = Vec<A>::width, together = 4;
  const int64_t count = rows.count * columns.count;
  Vec<A> sums[together];
  for (Vec<A>& s : sums) s = Vec<A>(A(0));
  int64_t i = 0;
  for (; i + together * width <= count; i += together * width)
#pragma GCC unroll 4
    for (int j = 0; j < together; j++) sums[j] += load(plane + i + j * width);
  for (int j = 1; i + width <= count; i += width, j++) sums[j] += load(plane + i);
  if (i < count) sums[0] += load_partial(plane + i, count - i);  // 0 beyond the plane
  return narrowed<T>(sum_of((sums[0] + sums[1]) + (sums[2] + sums[3])) / pool_divisor<A>(p, rows, columns));
}

// NCHW: one row of one output plane, its windows' rows before their columns. `extents`: the columns', null where they are not
// known.
template <class Reduce, class T>
void pool_plane_row(const Pool2dProblem& p, const PoolAxis& axis, Window rows, const Acc<T>* extents, const T* plane, T* y) {
  using A = Acc<T>;
  constexpr int width = Vec<A>::width;
  alignas(64) A reduced[kPoolSpan];
  int64_t o = 0;
  // Whole vectors of outputs whose windows are equally far apart.
  const int64_t extent = axis.dilation * (axis.kernel - 1) + 1;
  while (!axis.adaptive && o < p.out_width && (width - 1) * axis.stride + extent <= kPoolSpan) {
    const int64_t fitting = ((kPoolSpan - extent) / axis.stride + 1) / width,
                  vectors = smaller(fitting, ceil_div(p.out_width - o, width));
    const int64_t first = o * axis.stride - axis.pad;
    pool_rows_of<Reduce>(p, rows, plane, first, (vectors * width - 1) * axis.stride + extent, reduced);
    for (int64_t q = 0; q < vectors; q++, o += width) {
      Vec<A> v = Reduce::template start<A>();
      const A* from = reduced + q * width * axis.stride;
      for (int64_t s = 0; s < axis.kernel; s++) v = Reduce::add(v, load_strided(from + s * axis.dilation, axis.stride));
      const int64_t lanes = smaller(width, p.out_width - o);
      Vec<A> divisor(static_cast<A>(p.divisor));
      if (!p.divisor && extents) {
        divisor = load_some(extents + o, lanes) * Vec<A>(static_cast<A>(rows.extent));
      } else if (!p.divisor) {
        for (int64_t i = 0; i < lanes; i++) divisor.raw[i] = pool_divisor<A>(p, rows, axis.at(o + i));
      }
      v = Reduce::finish(v, divisor);
      lanes == width ? store(y + o, v) : store_partial(y + o, v, lanes);
    }
  }
  // The rest, one by one: columns [held, held_end) are reduced when the first of them is asked for.
  for (int64_t held = 0, held_end = 0; o < p.out_width; o++) {
    const Window columns = axis.at(o);
    Vec<A> v = Reduce::template start<A>();
    for (int64_t s = 0; s < columns.count; s++) {
      const int64_t column = columns[s];
      if (column < held || column >= held_end) {
        held = column, held_end = smaller(p.in_width, held + kPoolSpan);
        pool_rows_of<Reduce>(p, rows, plane, held, held_end - held, reduced);
      }
      v = Reduce::add(v, Vec<A>(reduced[column - held]));
    }
    y[o] = narrowed<T>(Reduce::finish(v, Vec<A>(pool_divisor<A>(p, rows, columns)))[0]);
  }
}

}  // namespace detail

// Bytes of workspace that pool2d takes.
AI3_INLINE int64_t pool2d_workspace(const Pool2dProblem& p, bool adaptive) {
  return with_type(p.dtype, [&]<class T>() -> int64_t {
    const bool tiles = detail::pool_tiles(p, pool_rows(p, adaptive), pool_columns(p, adaptive), Vec<Acc<T>>::width).rows > 0;
    return tiles ? workspace_bytes<T>(checked_mul(p.threads, detail::tile_elements<T>())) : 0;
  });
}
template <class Reduce, class T>
AI3_INLINE void pool2d(const Pool2dProblem& p, bool adaptive, const T* x, T* y, Workspace& workspace) {
  constexpr int width = Vec<Acc<T>>::width;
  const PoolAxis row_axis = pool_rows(p, adaptive), column_axis = pool_columns(p, adaptive);
  const bool nhwc = p.x_stride.c == 1 && p.y_stride.c == 1;
  // NHWC: a task has a row, pixel by pixel, with all channels or, where rows are few, as many blocks of them as threads can share
  // evenly. NCHW: planes outside, rows inside. So they lie in memory.
  constexpr int64_t kLarge = 4 << 20;  // bytes of output, from which it goes past the caches; four times as many of input: memory
  const int64_t taps = adaptive ? ceil_div(p.in_height, p.out_height) * ceil_div(p.in_width, p.out_width)
                                : smaller(p.kernel_height, p.in_height) * smaller(p.kernel_width, p.in_width);
  if (const detail::PoolTiles tiles = detail::pool_tiles(p, row_axis, column_axis, width); tiles.rows > 0)
    return detail::pool_by_tiles<Reduce>(p, row_axis, column_axis, tiles, taps, x, y, workspace);
  const int64_t rows_out = p.batch * p.out_height, vectors = ceil_div(p.channels, width);
  const int64_t blocks = !nhwc ? p.channels
                         : rows_out < (p.threads > 2 ? 8 : 4) * p.threads
                             ? smaller(vectors, round_up(ceil_div(vectors, detail::kPoolVectors), p.threads))
                             : smaller(vectors, 1);
  auto bytes = [&](int64_t pixels) { return p.batch * pixels * p.channels * static_cast<int64_t>(sizeof(T)); };
  detail::Traffic traffic{};
  traffic.past_caches =
      p.channels % width == 0 && has_whole_lines<T>(p.y_stride, y) && bytes(p.out_height * p.out_width) >= kLarge;
  if (bytes(p.in_height * p.in_width) >= 4 * kLarge)
    traffic.new_rows = adaptive ? p.in_height : p.stride_h, traffic.new_columns = adaptive ? p.in_width : p.stride_w;
  // Vectors that a task reads. Of a plane's mean they follow one another; of its other windows each is gathered.
  const double work = static_cast<double>(p.out_width) * static_cast<double>(taps) *
                      static_cast<double>(nhwc ? ceil_div(p.channels, larger(1, blocks)) : 1) / static_cast<double>(width);
  // Of planes: sizes of windows are found once for all of them.
  auto planes = [&](int64_t begin, int64_t end, int) {
    using A = Acc<T>;
    constexpr int64_t kKnown = 256;
    alignas(64) A extents[detail::kPoolSpan];
    Window windows[kKnown];
    const bool extents_known = !Reduce::ordered && !adaptive && !p.divisor && p.out_width <= detail::kPoolSpan;
    const bool windows_known = p.out_height <= kKnown && end - begin > p.out_height;
    for (int64_t o = 0; extents_known && o < p.out_width; o++) extents[o] = static_cast<A>(column_axis.at(o).extent);
    for (int64_t o = 0; windows_known && o < p.out_height; o++) windows[o] = row_axis.at(o);
    const Window columns = column_axis.at(0);
    const bool one = !Reduce::ordered && p.out_height * p.out_width == 1 && p.x_stride.w == 1 && p.x_stride.h == p.in_width &&
                     columns.count == p.in_width;
    int64_t row = begin % p.out_height, c = begin / p.out_height % p.channels, n = begin / p.out_height / p.channels;
    for (int64_t i = begin; i < end; i++) {
      const Window rows = windows_known ? windows[row] : row_axis.at(row);
      const T* const from = x + n * p.x_stride.n + c * p.x_stride.c;
      T* const to = y + n * p.y_stride.n + c * p.y_stride.c + row * p.y_stride.h;
      if constexpr (Reduce::ordered)
        detail::pool_plane_row_ordered<Reduce>(p, column_axis, rows, from, to);
      else if (one)
        *to = detail::mean_of_plane(p, rows, columns, from + rows.begin * p.x_stride.h);
      else
        detail::pool_plane_row<Reduce>(p, column_axis, rows, extents_known ? extents : nullptr, from, to);
      if (++row < p.out_height) continue;
      row = 0;
      if (++c == p.channels) c = 0, n++;
    }
  };
  auto pixels = [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; i++) {
      const Share block = share(vectors, blocks, i % blocks);
      const int64_t c = block.begin * width, row = i / blocks % p.out_height, n = i / blocks / p.out_height;
      const Window rows = row_axis.at(row);
      const T* from = x + n * p.x_stride.n + c * p.x_stride.c;
      T* to = y + n * p.y_stride.n + c * p.y_stride.c + row * p.y_stride.h;
      constexpr int64_t together = detail::kPoolVectors * width;
      const int64_t count = smaller(block.end * width, p.channels) - c;
      for (int64_t o = 0; o < p.out_width; o++, to += p.y_stride.w) {
        const Window columns = column_axis.at(o);
        for (int64_t k = 0; k < count; k += together)
          detail::pool_window<Reduce, detail::kPoolVectors>(p, rows, columns, from + k, to + k, smaller(together, count - k),
                                                            traffic);
      }
    }
    if (traffic.past_caches) finish_streaming();
  };
  const double worth_a_thread = nhwc ? 1 << 11 : p.out_height * p.out_width == 1 ? 1 << 10 : 1 << 8;
  const int64_t grain = work > worth_a_thread ? 1 : static_cast<int64_t>(worth_a_thread / (work > 1 ? work : 1));
  if (nhwc)
    parallel_ranges(p.threads, rows_out * blocks, grain, pixels, work);
  else
    parallel_ranges(p.threads, rows_out * blocks, grain, planes, work);
}

}  // namespace ai3::inline AI3_LEVEL

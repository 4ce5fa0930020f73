// Gradients of a convolution as matrix products with its patch matrix, whose rows are the output's pixels and whose columns are
// the taps and channels of one filter (Chellapilla et al. 2006), dY being a matrix of pixels by filters:
//   dW = dY^T * patches, summed over blocks of pixels;
//   dX = the patches dY * W, added up where they overlap.
// The matrix never exists: patches are gathered from x, or added into dX, one panel of columns and one block of pixels at a time,
// which stays in the cache. Threads split dW into parts, and dX into parts, that belong to one task each; the sums of an element
// are added up in one order however that is done, so results do not depend on the number of threads.
// Where the pixels of all images are fewer than a block, the weights are what weighs: columns then stand in the weights' own
// order, so that dW is written, and W read, as it lies.
#pragma once
#include "../core/instances.h"
#include "backward.h"
#include "patches.h"
#include "problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

// The columns of a group's patch matrix in panels: channels in blocks of a panel's width and, in each block, taps before
// channels. So a panel is one tap of a whole block, or several taps of a narrow last one. Or, `as_weights`, channels before taps:
// blocks and their panels are the same, only the columns in a block change places.
template <class T>
struct PatchColumns {
  static constexpr int64_t P = kPanel<Acc<T>>;
  const Conv2dProblem& p;
  const ConvShape shape;
  int64_t blocks, last, panels;  // last: channels of the last block
  const bool as_weights;
  bool runs;  // taps side by side are contiguous in x

  explicit PatchColumns(const Conv2dProblem& problem, bool in_weights_order = false)
      : p(problem),
        shape(p),
        blocks(ceil_div(shape.channels, P)),
        last(shape.channels - (blocks - 1) * P),
        panels(first_panel(blocks - 1) + ceil_div(last * shape.taps, P)),
        as_weights(in_weights_order),
        runs(!as_weights && blocks == 1 && p.x_stride.c == 1 && p.x_stride.w == shape.channels && p.dilation_w == 1) {}
  int64_t first_panel(int64_t block) const { return block * shape.taps; }
  int64_t end_panel(int64_t block) const { return block == blocks - 1 ? panels : first_panel(block + 1); }

  // body(tap, channel, column, count): `count` columns of the panel from `column` on (`as_weights`: each taps behind the
  // one before) are neighbouring channels of one tap or, with `across`, go on with the channels of the next taps of its row.
  template <class Body>
  AI3_INLINE void for_columns(int64_t panel, bool across, const Body& body) const {
    const int64_t block = panel / shape.taps, first = panel % shape.taps * P, n = block == blocks - 1 ? last : P;
    const int64_t end = smaller(first + P, n * shape.taps);
    if (as_weights) {
      for (int64_t tap = 0; tap < smaller(end, shape.taps); tap++) {
        const int64_t c = ceil_div(larger(0, first - tap), shape.taps), count = ceil_div(end - tap, shape.taps) - c;
        if (count > 0) body(tap, block * P + c, c * shape.taps + tap - first, count);
      }
      return;
    }
    for (int64_t q = first, count; q < end; q += count) {
      const int64_t tap = q / n, c = q % n;
      count = smaller((across ? p.kernel_width - tap % p.kernel_width : 1) * n - c, end - q);
      body(tap, block * P + c, q - first, count);
    }
  }

  // body(pixel, pixels, offset, column, count): what a panel's columns for the pixels [begin, end), numbered through all images,
  // have in x, as rectangles: pixels from begin + pixel on, stride_w * x_stride.w apart from x's element `offset` on, by `count`
  // elements. What lies outside the image is left out.
  template <class Body>
  AI3_INLINE void for_rectangles(int64_t begin, int64_t end, int64_t group, int64_t panel, const Body& body) const {
    for (int64_t m = begin, n; m < end; m += n) {
      const int64_t image = m / shape.pixels, oh = m % shape.pixels / p.out_width, ow = m % p.out_width;
      n = smaller(p.out_width - ow, end - m);
      for_columns(panel, runs, [&](int64_t tap, int64_t channel, int64_t column, int64_t count) {
        const int64_t h = oh * p.stride_h - p.pad_h + tap / p.kernel_width * p.dilation_h;
        const int64_t w = ow * p.stride_w - p.pad_w + tap % p.kernel_width * p.dilation_w;
        if (h < 0 || h >= p.in_height) return;
        const int64_t step = p.stride_w * p.x_stride.w, beyond = runs ? (channel + count - 1) / shape.channels : 0;
        const int64_t offset =
            image * p.x_stride.n + h * p.x_stride.h + w * p.x_stride.w + (group * shape.channels + channel) * p.x_stride.c;
        const Range first = inside(w, p.stride_w, p.in_width, n), final = inside(w + beyond, p.stride_w, p.in_width, n);
        const Range whole = {larger(first.begin, final.begin), smaller(first.end, final.end)};
        if (whole.size() > 0) body(m - begin + whole.begin, whole.size(), offset + whole.begin * step, column, count);
        if (beyond)  // pixels at the sides see a part of the run
          for (int64_t i = 0; i < n; i++) {
            if (i >= whole.begin && i < whole.end) continue;
            const int64_t left = w + i * p.stride_w, low = larger(0, -left * shape.channels - channel),
                          high = smaller(count, (p.in_width - left) * shape.channels - channel);
            if (low < high) body(m - begin + i, 1, offset + i * step + low, column + low, high - low);
          }
      });
    }
  }

  // The panel's part of the patch matrix, rows of P elements; columns behind its last one are not written.
  void gather(const T* x, int64_t begin, int64_t end, int64_t group, int64_t panel, Acc<T>* to) const {
    if (p.pad_h || p.pad_w) clear(to, (end - begin) * P);
    for_rectangles(begin, end, group, panel, [&](int64_t pixel, int64_t pixels, int64_t offset, int64_t column, int64_t count) {
      const int64_t step = p.stride_w * p.x_stride.w;
      Acc<T>* rows = to + pixel * P + column;
      if (!as_weights) return copy_rows(x + offset, step, p.x_stride.c, pixels, count, rows, P);
      for (int64_t i = 0; i < pixels; i++)
        for (int64_t e = 0; e < count; e++) rows[i * P + e * shape.taps] = widen(x[offset + i * step + e * p.x_stride.c]);
    });
  }
  // Adds it to dX in NHWC.
  void scatter(const Acc<T>* from, int64_t begin, int64_t end, int64_t group, int64_t panel, Acc<T>* x) const {
    constexpr int64_t width = P / 2, kAhead = 6;  // pixels
    const int64_t step = p.stride_w * p.x_stride.w;
    for_rectangles(begin, end, group, panel, [&](int64_t pixel, int64_t pixels, int64_t offset, int64_t column, int64_t count) {
      for (int64_t i = 0; i < pixels; i++) {
        const Acc<T>* row = from + (pixel + i) * P + column;
        Acc<T>* to = x + offset + i * step;
        if (as_weights) {
          for (int64_t e = 0; e < count; e++) to[e] += row[e * shape.taps];
          continue;
        }
        if (count == P) {  // each pixel's lines come from the L2 cache
          __builtin_prefetch(to + kAhead * step, 1), __builtin_prefetch(to + kAhead * step + width, 1);
          store(to, load(to) + load(row)), store(to + width, load(to + width) + load(row + width));
          continue;
        }
        for (int64_t e = 0; e < count; e += width) {
          if (count - e >= width)
            store(to + e, load(to + e) + load(row + e));
          else
            store_partial(to + e, load_partial(to + e, count - e) + load_partial(row + e, count - e), count - e);
        }
      }
    });
  }
};

// Threads for so many multiplications: waking a team takes as long as about 10^5 of them.
AI3_INLINE int team(int threads, double products) { return products < 1e5 ? 1 : threads; }

// ---- dW ----------------------------------------------------------------------------------------------------------------------

template <class T>
struct WeightGradient {
  using A = Acc<T>;
  static constexpr int64_t P = kPanel<A>, kPixels = 256;  // pixels of a block: a panel of it fills the L1 cache
  const Conv2dProblem& p;
  const PatchColumns<T> columns;
  const ConvShape& s;
  const int64_t filter_panels, pixels;  // pixels of a block
  const bool in_place;                  // sums are added up in dW itself: its columns are those of the patches
  const int threads;
  Grid grid{1, 1};  // prepared: shares of the filters, streamed: shares of the columns

  explicit WeightGradient(const Conv2dProblem& problem)
      : p(problem),
        columns(p, sizeof(T) == sizeof(A) && ConvShape(p).rows <= kPixels),
        s(columns.shape),
        filter_panels(panel_count<A>(s.filters)),
        pixels(smaller(kPixels, s.rows)),
        in_place(sizeof(T) == sizeof(A) && (s.taps == 1 || columns.as_weights)),
        threads(team(p.threads, static_cast<double>(s.rows * p.groups) * static_cast<double>(s.filters * s.depth))) {
    constexpr int64_t kCopy = 10;  // cycles to copy a panel's row, which takes P to be multiplied with P others
    constexpr int64_t kCached = (512 << 10) / (P * P * static_cast<int64_t>(sizeof(A)));
    const int64_t far = 1024 / pixels;  // more for each pixel where sums leave the L2 cache between blocks
    int64_t least = 0;
    for (int64_t f = 1; f <= smaller(filter_panels, 4 * threads); f++)
      for (int64_t c = 1; c <= smaller(columns.panels, 4 * threads); c++) {
        const int64_t rows = ceil_div(filter_panels, f), cols = ceil_div(columns.panels, c);
        const int64_t products = rows * cols * (P + (rows * cols > kCached ? far : 0));
        const int64_t time = ceil_div(p.groups * f * c, threads) * (products + (rows + cols) * kCopy);
        if (least == 0 || time < least) grid = {f, c}, least = time;
      }
  }
  int64_t filter_share() const { return ceil_div(filter_panels, grid.prepared) * P; }
  int64_t column_share() const { return ceil_div(columns.panels, grid.streamed) * P; }
  int64_t buffer_elements() const {
    const int64_t rows = checked_mul(pixels, P + filter_share());
    return round_up(checked_add(rows, checked_mul(filter_share(), in_place ? 1 : column_share() + 1)), 64);
  }
  int64_t workspace() const { return workspace_bytes<A>(checked_mul(threads, buffer_elements())); }

  void run(const T* gy, const T* x, T* dw, T* db, Workspace& memory) const {
    A* buffers = memory.take<A>(threads * buffer_elements());
    for_grid(threads, p.groups, grid, [&](int64_t group, int64_t i, int64_t j, int thread) {
      const Share filters = AI3_LEVEL::column_share<A>(s.filters, grid.prepared, i),
                  panels = share(columns.panels, grid.streamed, j);
      const int64_t count = filters.end - filters.begin, first = group * s.filters + filters.begin;
      A *patches = buffers + thread * buffer_elements(), *rows = patches + pixels * P, *bias = rows + pixels * filter_share();
      Output<A> sums{bias + filter_share(), (panels.end - panels.begin) * P};
      if constexpr (sizeof(T) == sizeof(A))
        if (in_place) sums = {dw + first * s.depth + panels.begin * P, s.depth};
      const bool with_bias = db && panels.begin == 0;
      if (with_bias) clear(bias, filter_share());
      for (int64_t m = 0; m < s.rows; m += pixels) {
        const int64_t n = smaller(pixels, s.rows - m);
        pack_filters(gy, first, count, m, n, rows);
        if (with_bias) add_up(rows, count, n, bias);
        sums.add = m > 0;
        for (int64_t q = panels.begin; q < panels.end; q++) {
          columns.gather(x, m, m + n, group, q, patches);
          gemm_block<A>(PanelRows<A>{rows}, count, patches, in_place ? smaller(P, s.depth - q * P) : P, n,
                        sums.from(0, (q - panels.begin) * P));
        }
      }
      for (int64_t f = 0; f < count; f++) {
        if (with_bias) narrow(bias[f], db[first + f]);
        for (int64_t q = panels.begin; q < panels.end && !in_place; q++) {
          const A* from = sums.from(f, (q - panels.begin) * P).data;
          columns.for_columns(q, false, [&](int64_t tap, int64_t channel, int64_t column, int64_t n) {
            T* to = dw + (first + f) * s.depth + channel * s.taps + tap;
            for (int64_t c = 0; c < n; c++) narrow(from[column + c], to[c * s.taps]);
          });
        }
      }
    });
  }

  // dY of n pixels, as panels of filters.
  void pack_filters(const T* gy, int64_t filter, int64_t count, int64_t m, int64_t n, A* to) const {
    for (int64_t f = 0; f < count; f += P, to += n * P) {
      if (count - f < P) clear(to, n * P);
      for (int64_t i = 0, part; i < n; i += part) {
        const int64_t image = (m + i) / s.pixels, pixel = (m + i) % s.pixels;
        part = smaller(s.pixels - pixel, n - i);
        copy_rows(gy + image * p.y_stride.n + pixel * p.y_stride.w + (filter + f) * p.y_stride.c, p.y_stride.w, p.y_stride.c,
                  part, smaller(P, count - f), to + i * P, P);
      }
    }
  }
  // Adds their sums over the pixels.
  static void add_up(const A* rows, int64_t count, int64_t n, A* sums) {
    using V = Vec<A>;
    for (int64_t f = 0; f < count; f += P, rows += n * P) {
      V left(A{0}), right(A{0});
      for (int64_t i = 0; i < n; i++) left += load(rows + i * P), right += load(rows + i * P + V::width);
      store(sums + f, load(sums + f) + left), store(sums + f + V::width, load(sums + f + V::width) + right);
    }
  }
};

// ---- dX ----------------------------------------------------------------------------------------------------------------------

template <class T>
struct InputGradient {
  using A = Acc<T>;
  static constexpr int64_t P = kPanel<A>, kPixels = 112;  // about so many pixels of a block
  const Conv2dProblem& p;
  const PatchColumns<T> columns;
  const ConvShape& s;
  const int64_t lines;  // rows of dY in a block
  const bool plain;     // patches do not overlap: the product is dX
  const bool in_place;  // sums are added up in dX itself
  const bool copies;    // dY must be copied to be read as rows of the accumulator's type
  const int threads;
  int64_t splits = 1, bands = 1;  // of the blocks of channels; of dX's rows

  explicit InputGradient(const Conv2dProblem& problem)
      : p(problem),
        columns(p, reads_weights_as_they_lie(p)),
        s(columns.shape),
        lines(larger(1, smaller(p.out_height, kPixels / p.out_width))),
        plain(s.taps == 1 && p.stride_h == 1 && p.stride_w == 1 && !p.pad_h && !p.pad_w),
        in_place(sizeof(T) == sizeof(A) && p.x_stride.c == 1),
        copies(sizeof(T) != sizeof(A) || p.y_stride.c != 1),
        threads(team(p.threads, static_cast<double>(s.rows * p.groups) * static_cast<double>(s.filters * s.depth))) {
    int64_t least = 0;
    for (int64_t c = 1; c <= smaller(columns.blocks, 4 * threads); c++)
      for (int64_t b = 1; b <= smaller(p.in_height, 4 * threads); b++) {
        const int64_t rows = (ceil_div(p.in_height, b) + (p.kernel_height - 1) * p.dilation_h) / p.stride_h + 1;
        const int64_t time = ceil_div(p.batch * p.groups * b * c, threads) * rows * ceil_div(columns.blocks, c);
        if (least == 0 || time < least) splits = c, bands = b, least = time;
      }
  }
  static bool reads_weights_as_they_lie(const Conv2dProblem& p) {
    const ConvShape s(p);
    return sizeof(T) == sizeof(A) && s.taps > 1 && s.rows <= WeightGradient<T>::kPixels && p.x_stride.c == 1 &&
           p.y_stride.c == 1 && !rows_collide<A>(p.y_stride.w) && (p.batch == 1 || p.y_stride.n == s.pixels * p.y_stride.w) &&
           p.groups * ceil_div(s.channels, P) >= 8;  // tasks; not of `threads`, on which no sum may depend
  }
  int64_t packed_elements() const { return columns.as_weights ? 0 : checked_product({p.groups, columns.panels, s.filters, P}); }
  int64_t row_elements() const {
    if (columns.as_weights) return checked_mul(s.filters + s.rows, P);  // a panel of weights, and of patches
    return checked_product({lines, p.out_width, copies ? P + prepared_stride<A>(s.filters) : P});
  }
  int64_t sum_elements() const {  // a vector more is read
    return plain || in_place ? 0 : checked_product({ceil_div(p.in_height, bands) + 1, p.in_width, s.channels}) + P;
  }
  int64_t buffer_elements() const { return round_up(checked_add(row_elements(), sum_elements()), 64); }
  int64_t workspace() const {
    return checked_add(workspace_bytes<A>(packed_elements()), workspace_bytes<A>(checked_mul(threads, buffer_elements())));
  }

  // W as panels [group][panel][filter][P].
  void pack(const T* w, A* packed) const {
    parallel_for(threads, p.groups * columns.blocks, [&](int64_t i, int) {
      const int64_t group = i / columns.blocks, block = i % columns.blocks;
      for (int64_t f = 0; f < s.filters; f++) {
        const T* from = w + (group * s.filters + f) * s.depth;
        for (int64_t q = columns.first_panel(block); q < columns.end_panel(block); q++) {
          A* to = packed + ((group * columns.panels + q) * s.filters + f) * P;
          int64_t end = 0;
          columns.for_columns(q, false, [&](int64_t tap, int64_t channel, int64_t column, int64_t n) {
            for (int64_t c = 0; c < n; c++) to[column + c] = widen(from[(channel + c) * s.taps + tap]);
            end = column + n;
          });
          clear(to + end, P - end);
        }
      }
    });
  }

  // Each task copies a panel of weights after the other, prefetches the next one, and adds up all pixels of its channels.
  void run_as_weights(const T* gy, const T* w, T* dx, A* buffers) const {
    const int64_t slabs = ceil_div(s.rows, kRows);
    parallel_for(threads, p.groups * columns.blocks, [&](int64_t i, int thread) {
      const int64_t group = i / columns.blocks, block = i % columns.blocks, channel = group * s.channels + block * P;
      A *panel = buffers + thread * buffer_elements(), *patches = panel + s.filters * P;
      for (int64_t n = 0; n < p.batch; n++)
        for (int64_t h = 0; h < p.in_height; h++)
          for (int64_t j = 0; j < p.in_width; j++)
            clear(dx + n * p.x_stride.n + h * p.x_stride.h + j * p.x_stride.w + channel, smaller(P, s.channels - block * P));
      for (int64_t q = columns.first_panel(block); q < columns.end_panel(block); q++) {
        const T* from = w + group * s.filters * s.depth + q * P;
        pack_panels(from, s.filters, smaller(P, s.depth - q * P), s.depth, 1, panel, 0);
        Next next{reinterpret_cast<const char*>(from + P), s.depth * static_cast<int64_t>(sizeof(T))};
        for (int64_t j = 0; j < slabs; j++, next.step = 0) {
          const Share rows = share(s.rows, slabs, j);
          multiply_slab<A>(StridedRows<A>{gy + group * s.filters, p.y_stride.w}.from(rows.begin), rows.end - rows.begin, panel, P,
                           s.filters, Output<A>{patches + rows.begin * P, P}, next);
        }
        columns.scatter(patches, 0, s.rows, group, q, dx);
      }
    });
  }

  void run(const T* gy, const T* w, T* dx, Workspace& memory) const {
    if constexpr (sizeof(T) == sizeof(A))
      if (columns.as_weights) return run_as_weights(gy, w, dx, memory.take<A>(threads * buffer_elements()));
    A* packed = memory.take<A>(packed_elements());
    pack(w, packed);
    A* buffers = memory.take<A>(threads * buffer_elements());
    parallel_for(threads, p.batch * p.groups * splits * bands, [&](int64_t i, int thread) {
      const Share blocks = share(columns.blocks, splits, i % splits), rows = share(p.in_height, bands, i / splits % bands);
      const int64_t group = i / splits / bands % p.groups, image = i / splits / bands / p.groups;
      A* buffer = buffers + thread * buffer_elements();
      T* y = dx + image * p.x_stride.n + rows.begin * p.x_stride.h;
      band(gy + image * p.y_stride.n, packed + group * columns.panels * s.filters * P, y, group, blocks, rows, buffer);
    });
  }

  // Rows of one image's dX, to the first of which `y` points, for some blocks of a group's channels.
  void band(const T* gy, const A* packed, T* y, int64_t group, Share blocks, Share rows, A* buffer) const {
    const int64_t channel = blocks.begin * P, count = smaller(blocks.end * P, s.channels) - channel;
    A *tile = buffer, *copy = tile + lines * p.out_width * P, *sums = buffer + row_elements();
    if (plain) {
      for (int64_t first = rows.begin; first < rows.end; first += lines) {
        const int64_t begin = first * p.out_width, n = smaller(lines, rows.end - first) * p.out_width;
        Output<T> out{y + (begin - rows.begin * p.out_width) * p.x_stride.w + (group * s.channels + channel) * p.x_stride.c,
                      p.x_stride.w};
        out.column_stride = p.x_stride.c;
        gemm_block<T>(filter_rows(gy, group, begin, begin + n, copy), n, packed + blocks.begin * s.filters * P, count, s.filters,
                      out);
      }
      return;
    }
    Conv2dProblem q = p;  // as if the rows were the whole image
    q.in_height = rows.end - rows.begin, q.pad_h = p.pad_h + rows.begin;
    if (!in_place) {
      q.x_stride = {0, 1, p.in_width * s.channels, s.channels};
      clear(sums, q.in_height * p.in_width * s.channels);
      sums -= group * s.channels;
    } else if constexpr (sizeof(T) == sizeof(A)) {
      sums = y;
      for (int64_t h = 0; h < q.in_height; h++)
        for (int64_t j = 0; j < p.in_width; j++)
          clear(y + h * p.x_stride.h + j * p.x_stride.w + group * s.channels + channel, count);
    }
    const PatchColumns<T> part(q);
    // Blocks of dY's rows begin at fixed rows, so that the order of additions does not depend on the band.
    const Range seen = {larger(0, (rows.begin + p.pad_h - (p.kernel_height - 1) * p.dilation_h) / p.stride_h),
                        smaller(p.out_height, (rows.end - 1 + p.pad_h) / p.stride_h + 1)};
    for (int64_t b = blocks.begin; b < blocks.end; b++)
      for (int64_t first = seen.begin / lines * lines; first < seen.end; first += lines) {
        const int64_t begin = larger(first, seen.begin) * p.out_width, end = smaller(first + lines, seen.end) * p.out_width;
        const StridedRows<A> a = filter_rows(gy, group, begin, end, copy);
        for (int64_t panel = columns.first_panel(b); panel < columns.end_panel(b); panel++) {
          gemm_block(a.data, a.stride, end - begin, packed + panel * s.filters * P, P, s.filters, tile, P, false);
          part.scatter(tile, begin, end, group, panel, sums);
        }
      }
    if (!in_place)
      for (int64_t h = 0; h < q.in_height; h++) {
        Output<T> out{y + h * p.x_stride.h + (group * s.channels + channel) * p.x_stride.c, p.x_stride.w};
        out.column_stride = p.x_stride.c;
        store_block(out, sums + group * s.channels + h * q.x_stride.h + channel, s.channels, p.in_width, count);
      }
  }

  // dY of the pixels [begin, end) of an image as rows of filters.
  StridedRows<A> filter_rows(const T* gy, int64_t group, int64_t begin, int64_t end, A* copy) const {
    const T* from = gy + begin * p.y_stride.w + group * s.filters * p.y_stride.c;
    if constexpr (sizeof(T) == sizeof(A))
      if (!copies) return {from, p.y_stride.w};
    const int64_t ld = prepared_stride<A>(s.filters);
    copy_rows(from, p.y_stride.w, p.y_stride.c, end - begin, s.filters, copy, ld);
    return {copy, ld};
  }
};

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

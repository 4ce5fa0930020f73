// Direct convolution: no transform and no copy of the image. A register tile holds a few neighbouring output pixels of a row by
// two vectors of output channels and stays in registers over all kernel positions and input channels (Georganas et al. 2018,
// Zhang et al. 2018). Weights are read in the blocked form [group][K/b][R][S][C/groups][b], b up to two vectors, in the
// accumulator's type; a 1x1 kernel with stride 1 is a matrix product over pixels, whose rows this file makes as long as it likes.
// Strides are read from the problem, so NCHW and NHWC differ only in how a finished tile is stored.
#include "../core/grid.h"
#include "backward.h"
#include "delegated.h"
#include "direct_tile.h"
#include "problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {
using namespace direct;

// A 1x1 kernel on more channels than these is a packed product; with fewer, tiles are too short for it
// (docs/decisions/direct.md).
constexpr int64_t kFewChannels = 64;

// Whether NHWC pixels are multiplied by pairs of bfloat16, whose panels follow the other weights in the pack.
AI3_INLINE bool multiplies_pairs(const Conv2dProblem& p) {
  return p.dtype == DType::bf16 && is_pointwise(p) && p.in_channels / p.groups % 2 == 0 && has_pair_products();
}

// Of an output value; then a tile's begin and end cost as much as its products.
constexpr int64_t kFewProducts = 512;
AI3_INLINE bool has_few_products(const Conv2dProblem& p) {
  return p.kernel_height * p.kernel_width * (p.in_channels / p.groups) <= kFewProducts;
}

// Joined groups (joined_groups.h) are packed as one.
struct Blocking {
  int64_t channels;                     // of one group
  int64_t joined, groups;               // joined: groups that are packed as one, of which there are `groups`
  int64_t out_channels, block, blocks;  // of them; `block` output channels are stored side by side
  AI3_INLINE explicit Blocking(const Conv2dProblem& p)
      : channels(p.in_channels / p.groups),
        joined(multiplies_pairs(p) ? 1 : joined_groups(p)),
        groups(ceil_div(p.groups, joined)),
        out_channels(p.out_channels / p.groups * joined) {
    const int64_t tile = 2 * lanes_of(p);
    for (block = 4; block < tile && block < out_channels;) block *= 2;
    blocks = ceil_div(out_channels, block);
  }
  // Groups that are packed as one are computed as one where their channels lie side by side and, if they do not fill their last
  // vector, have rows of their own.
  AI3_INLINE bool spread(const Conv2dProblem& p, bool has_rows) const {
    return joined > 1 && p.x_stride.c == 1 && (has_rows || groups_fill_vectors(p));
  }
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
      const int64_t group = i / b.blocks * b.out_channels, first = i % b.blocks * b.block,
                    count = smaller(smaller(b.block, b.out_channels - first), p.out_channels - group - first);
      const T* from = w + (group + first) * columns;
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

// A 1x1 convolution as packed products, one for each group: rows_of(group) are the pixels, `steps` the elements or pairs of their
// channels, `preparation` what a prologue costs (as gemm_grid counts it).
template <class T, class RowsOf>
void multiply_pixels(const Conv2dProblem& p, const Blocking& b, const Conv2dOperands& m, const Acc<T>* panels, int64_t steps,
                     const RowsOf& rows_of, double preparation = 0) {
  using A = Acc<T>;
  const int64_t pixels = p.batch * p.out_height * p.out_width;
  Grid grid;
  if constexpr (dtype_of<T> == DType::bf16)
    grid = pair_grid(p.threads, p.groups, pixels, b.out_channels, steps, preparation);
  else
    grid = gemm_grid<A>(p.threads, p.groups, ceil_div(pixels, kRows), kRows, panel_count<A>(b.out_channels), steps, preparation);
  auto multiply_task = [&](int64_t g, int64_t i, int64_t j, int) {
    const Share rows = row_share(pixels, grid, i), filters = column_share<A>(b.out_channels, grid.streamed, j);
    Output<T> y{m.output.write<T>(), p.y_stride.w};
    y.set_epilogue(p.activation, m);
    gemm_block<T>(rows_of(g).from(rows.begin), rows.end - rows.begin,
                  panels + g * packed_size<A>(steps, b.out_channels) + filters.begin * steps, filters.end - filters.begin, steps,
                  y.from(rows.begin, g * b.out_channels + filters.begin));
  };
  for_grid(p.threads, p.groups, grid, multiply_task, product_size<A>(pixels, b.out_channels, steps, grid));
}
// Returns false where the layout or the type is none that the packed product takes.
template <class T>
bool multiply_pixels(const Conv2dProblem& p, const Blocking& b, const Conv2dOperands& m) {
  const int64_t pixels = p.out_height * p.out_width, stride = p.x_stride.w;
  if (!is_pointwise(p) || p.x_stride.c != 1 || p.y_stride.c != 1 || pixels == 1) return false;
  if (p.x_stride.n != pixels * stride || p.y_stride.n != pixels * p.y_stride.w) return false;
  const T* x = m.input.read<T>();
  [[maybe_unused]] const Prologue<Acc<T>> prologue(p, m);
  if constexpr (dtype_of<T> == DType::bf16) {
    if (!multiplies_pairs(p) || prologue) return false;
    const float* pairs = reinterpret_cast<const float*>(m.weight.read<char>() + blocks_bytes(p));
    multiply_pixels<T>(p, b, m, pairs, b.channels / 2, [&](int64_t g) { return PairRows{x + g * b.channels, stride}; });
    return true;
  } else if constexpr (same<T, Acc<T>>) {
    const bool few = b.channels <= kFewChannels && b.out_channels % b.block == 0;
    if (b.block != kPanel<T> || (few && !prologue)) return false;
    if (prologue)
      multiply_pixels<T>(
          p, b, m, m.weight.read<T>(), b.channels,
          [&](int64_t g) {
            return PrologueRows<T>{x + g * b.channels, stride, prologue.from(g * b.channels)};
          },
          .25);
    else
      multiply_pixels<T>(p, b, m, m.weight.read<T>(), b.channels, [&](int64_t g) {
        return StridedRows<T>{x + g * b.channels, stride};
      });
    return true;
  }
  return false;
}

// A convolution, and what all its tiles share.
template <class T>
class DirectConvolution {
  using A = Acc<T>;
  static constexpr int width = Vec<A>::width;

 public:
  DirectConvolution(const Conv2dProblem& problem, const Blocking& blocking, const Conv2dOperands& m)
      : b(blocking),
        pointwise(is_pointwise(problem)),
        p(regrouped(problem, larger(1, b.blocks))),
        all_pixels(problem.out_height * problem.out_width * (problem.batch / p.batch)),
        operands{m.input.read<T>(), m.output.write<T>(), m.residual.read<T>()},
        w(m.weight.read<A>()),
        of_channels{m.bias.read<T>(), m.slope.read<A>()},
        prologue(problem, m),
        in_place(same<T, A> && p.y_stride.c == 1 && operands.residual != operands.y),
        needs_finish(operands.residual || p.activation != Activation::none),
        has_group_rows(in_place && !prologue && groups_have_rows(p)),
        spread(b.spread(p, has_group_rows)),
        groups(spread ? b.groups : p.groups),
        channels(b.channels * (spread ? b.joined : 1)),
        filters(spread ? b.out_channels : p.out_channels / p.groups),
        few(has_few_products(p)),
        whole(whole_kernel()),
        tile_pixels(tile_size(whole.x_pixel, b.block > width)),
        interior(
            inside(-p.pad_w, p.stride_w, p.in_width - (p.kernel_width - 1) * p.dilation_w, tiles_are_alike() ? p.out_width : 0)),
        whole_rows(inside(-p.pad_h, p.stride_h, p.in_height - (p.kernel_height - 1) * p.dilation_h, p.out_height)),
        edges_alike(edges_see_the_image()),
        lines(lines_of_output()),
        turned(p),
        tasks(split()) {
    turned.y_stride.w = p.y_stride.h;
  }

  void run() const {
    const double work = static_cast<double>(all_pixels * p.batch) * static_cast<double>(p.out_channels) *
                        static_cast<double>(whole.rows * whole.columns * b.channels);
    parallel_for(
        work < 1e5 ? 1 : p.threads, tasks.count, [&](int64_t i, int) { take(i); },
        [&](int64_t i) {
          const Share rows = tasks.rows(p, i), of = tasks.filters(b, i);
          const int64_t pixels = smaller(rows.end * p.out_width, all_pixels) - rows.begin * p.out_width;
          return static_cast<double>(pixels * larger(0, of.end - of.begin) * ceil_div(b.block, width) * whole.rows *
                                     whole.columns * b.channels);
        });
  }

 private:
  static constexpr int64_t kRowBytes = 512 << 10, kWeightBytes = 384 << 10;  // what is held in the second-level cache

  // Input, output and residual (null: none), from some element on.
  struct Operands {
    const T* x;
    T* y;
    const T* residual;
    AI3_INLINE Operands from(int64_t x_elements, int64_t y_elements) const {
      return {x + x_elements, y + y_elements, residual ? residual + y_elements : nullptr};
    }
  };
  // The weights of a block of output channels, and those channels' bias and slope.
  struct Filters {
    const A* weights;
    Channels<T> of;
    AI3_INLINE Filters from(int64_t elements) const { return {weights + elements, of}; }
  };

  // How the work is split: a task has the rows of one of `chunks` parts of an image, of one group's channels, and one of `splits`
  // parts of the output channels, up to `blocks` blocks, of which `pass` at a time pass over the rows.
  struct Tasks {
    int64_t chunks, blocks, splits, pass, count;
    AI3_INLINE int64_t image_and_group(int64_t i) const { return i / splits / chunks; }
    AI3_INLINE Share rows(const Conv2dProblem& p, int64_t i) const { return share(p.out_height, chunks, i / splits % chunks); }
    AI3_INLINE Share filters(const Blocking& b, int64_t i) const {
      const int64_t first = i % splits * blocks;
      return {first, smaller(b.blocks, first + blocks)};
    }
  };
  // Where the weights fit the second-level cache, tiles go through all blocks of output channels, so that the output is written
  // from begin to end; otherwise a task's rows of input and output stay there while blocks pass over them.
  Tasks split() const {
    const bool weights_stay = b.blocks * whole.w_block * static_cast<int64_t>(sizeof(A)) <= kWeightBytes;
    const int64_t row_elements = smaller(p.stride_h, p.in_height) * p.in_width * channels + p.out_width * filters,
                  images = p.batch * groups;
    const bool split_rows = images < p.threads && b.blocks < 4 * p.threads;
    const int64_t fitting =
        weights_stay ? images * p.out_height / (4 * p.threads) : kRowBytes / (row_elements * static_cast<int64_t>(sizeof(T)));
    const int64_t rows = larger(1, smaller(fitting, split_rows ? ceil_div(p.out_height, p.threads) : p.out_height));
    const int64_t least = ceil_div(p.out_height, rows);
    const bool uneven = images % p.threads != 0 && least > 1;
    const int64_t chunks = uneven ? smaller(round_up(least, p.threads), p.out_height) : least, parts = images * chunks;
    // Smaller tasks where chunks differ by a row, so that threads that are done find something to take over.
    const int64_t each = p.threads > 2 && p.out_height % chunks != 0 ? 8 : 4;
    const int64_t most = p.threads == 1 ? 1 : smaller(b.blocks, ceil_div(each * p.threads, parts)),
                  blocks = ceil_div(b.blocks, most), splits = p.threads > 2 ? ceil_div(b.blocks, blocks) : most;
    return {chunks, blocks, splits, weights_stay ? blocks : 1, parts * splits};
  }

  Span whole_kernel() const {
    Span span{};
    span.rows = p.kernel_height, span.columns = p.kernel_width, span.channels = b.channels;
    span.x_row = p.dilation_h * p.x_stride.h, span.x_column = p.dilation_w * p.x_stride.w;
    span.x_channel = p.x_stride.c, span.x_pixel = p.stride_w * p.x_stride.w;
    span.w_channel = b.block, span.w_column = b.channels * b.block, span.w_row = p.kernel_width * span.w_column;
    span.w_block = p.kernel_height * span.w_row, span.spread = spread;
    return span;
  }
  // Fewer pixels of a tile where they share one set of the first-level cache.
  AI3_INLINE int64_t tile_size(int64_t x_pixel, bool two) const {
    const int64_t most = two || spread ? kPixels : kNarrowPixels;
    return same<T, A> && p.x_stride.c == 1 && rows_collide<T>(x_pixel) ? most / 2 : most;
  }
  // Pixels whose window lies inside the image's columns are most of a row, and where sums need no buffer their tiles differ in
  // their address alone. The few pixels beside them are tiles of their own then, which go down the rows; of a narrow row they are
  // too many, and cost more than is saved where there are many products.
  bool tiles_are_alike() const {
    const bool pays = p.pad_w == 0 || p.out_width > kPixels || few;
    return pays && in_place && !prologue && b.channels > 0 && (b.joined == 1 || spread);
  }
  // Output channels of the last block of a group.
  AI3_INLINE int64_t last_count() const { return spread ? b.block : filters - (b.blocks - 1) * b.block; }
  Lines lines_of_output() const {
    const int64_t size = static_cast<int64_t>(sizeof(T)), written = p.batch * p.out_height * p.y_stride.h * size;
    const bool whole_lines =
        has_whole_lines<T>(p.y_stride, operands.y) && b.block * size % 64 == 0 && last_count() == b.block && !needs_finish;
    if (whole_lines && written >= (p.in_channels <= 4 ? kLargeFromImages : kLargeFrom)) return Lines::past_caches;
    return written >= kPrefetchedFrom ? Lines::prefetched : Lines::cached;
  }
  // The columns beside the interior, and which of the kernel's columns one sees inside the image.
  template <class Body>
  AI3_INLINE void for_edges(const Body& body) const {
    for (int64_t column = 0; column < interior.begin; column++) body(column);
    for (int64_t column = interior.end; column < p.out_width; column++) body(column);
  }
  AI3_INLINE Range seen_from(int64_t column) const {
    return inside(column * p.stride_w - p.pad_w, p.dilation_w, p.in_width, p.kernel_width);
  }
  bool edges_see_the_image() const {
    bool all = interior.size() > 0;
    if (all) for_edges([&](int64_t column) { all &= seen_from(column).size() > 0; });
    return all;
  }

  AI3_INLINE Filters filters_of(int64_t group, int64_t block) const {
    const int64_t panel = spread || b.joined == 1 ? (group * b.blocks + block) * whole.w_block
                                                  : group / b.joined * whole.w_block + group % b.joined * filters;
    return {w + panel, of_channels.from(group * filters + block * b.block)};
  }
  AI3_INLINE int64_t y_channel(int64_t group, int64_t block) const { return (group * filters + block * b.block) * p.y_stride.c; }
  // Neighbouring columns' channels are one run of memory in a dense NHWC image: the first layers' few channels get long loops.
  AI3_INLINE static Span joined(Span span) {
    if (span.x_column == span.channels * span.x_channel && !span.spread) span.channels *= span.columns, span.columns = 1;
    return span;
  }

  // One tile: output pixels [column, column + pixels) of a row by `count` output channels, and their bias.
  AI3_INLINE void tile(const Operands& at, int64_t row, int64_t column, int64_t pixels, const Filters& by, int64_t count,
                       const Prologue<A>& f) const {
    alignas(64) A buffer[kNarrowPixels * 2 * width], widened[2 * width];
    const bool direct = in_place && count % width == 0, two = count > width;
    const A* bias = widened;
    const T* const given = by.of.bias;
    if constexpr (same<T, A>)
      if (given && count % width == 0) bias = given;
    if (bias == widened)
      for (int64_t q = 0; q < count; q += width)
        store(widened + q, !given ? Vec<A>(A(0)) : count - q < width ? load_partial(given + q, count - q) : load(given + q));
    const int64_t shift = row * p.y_stride.h + column * p.y_stride.w;
    T* out = at.y + shift;
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
    bool started = false, biased = false;  // biased: all of the sum is one part, with the bias
    auto each_vector = [&](const auto& put) {
      for (int64_t j = 0; j < pixels; j++)
        for (int64_t q = 0; q < count; q += width) put(sums + j * sums_pixel + q, load(bias + q));
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
        if (!started && !full) {
          each_vector([](A* to, Vec<A>) { store(to, Vec<A>(A(0))); });
          started = true;
        }
        Span span = whole;
        span.rows = valid.size(), span.columns = end - s;
        if (!f) span = joined(span);
        const T* from = at.x + (top + valid.begin * p.dilation_h) * p.x_stride.h +
                        (left + s * p.dilation_w + seen.begin * p.stride_w) * p.x_stride.w;
        const A* panel_part = by.weights + valid.begin * span.w_row + s * span.w_column;
        A* const into = sums + seen.begin * sums_pixel;
        biased = full && s == 0 && end == p.kernel_width;
        const A* added = biased ? bias : kZeros<A>;
        if (started) span.lines = Lines::added_to;
        if (!same<T, A> || f)
          accumulate_staged<T>(seen.size(), two, from, panel_part, into, sums_pixel, added, span, f);
        else if constexpr (same<T, A>)
          accumulate<kNarrowPixels>(seen.size(), two, from, panel_part, into, sums_pixel, added, span);
        started = true;
      }
      s = end;
    }
    if (!biased) each_vector([started](A* to, Vec<A> b) { store(to, started ? load(to) + b : b); });
    if (!direct || needs_finish)
      finish<T>(p, sums, sums_pixel, pixels, count, by.of.slope, at.residual ? at.residual + shift : nullptr, out);
  }

  // Blocks of output channels, which begin there and are `count` each: whole vectors where there are several.
  struct Some {
    int64_t y;
    Filters by;
    int64_t blocks, count;
  };
  // body(some) for blocks [begin, end) of a group: those that are alike, and the last where it has fewer channels.
  template <class Body>
  AI3_INLINE void each_alike(int64_t group, Share of, const Body& body) const {
    const bool cut = of.end == b.blocks && (last_count() != b.block || b.block % width != 0);
    const int64_t whole_ones = of.end - of.begin - cut;
    if (whole_ones > 0) body(Some{y_channel(group, of.begin), filters_of(group, of.begin), whole_ones, b.block});
    if (cut) body(Some{y_channel(group, of.end - 1), filters_of(group, of.end - 1), 1, last_count()});
  }

  // `count` pixels by some blocks, in tiles that differ in their address alone: pixels are span.x_pixel apart in the image and
  // q.y_stride.w in the output.
  void alike_tiles(const Conv2dProblem& q, Span span, int64_t count, Operands at, const Filters& by, const Some& some) const {
    if constexpr (same<T, A>) {
      const bool two = some.count > width;
      span = joined(span);
      span.blocks = some.blocks, span.lines = lines, span.rest = some.count % width;
      if (by.of.bias) span.bias_block = b.block;
      alignas(64) A padded[2 * width];
      const A* bias = by.of.bias ? by.of.bias : kZeros<A>;
      if (by.of.bias && span.rest) {
        for (int64_t k = 0; k < 2 * width; k++) padded[k] = k < some.count ? by.of.bias[k] : A(0);
        bias = padded;
      }
      const bool finished = few && !spread && !span.rest && needs_finish && is_applied_in_registers(q.activation, at.residual);
      if (finished) {
        span.activation = q.activation;
        if (at.residual) span.residual_behind = reinterpret_cast<const char*>(at.residual) - reinterpret_cast<const char*>(at.y);
      }
      int64_t tiles = ceil_div(count, tile_size(span.x_pixel, two));
      while (tiles > 0) {  // first the wider tiles
        const int64_t pixels = ceil_div(count, tiles), wider = count - (pixels - 1) * tiles;
        span.tiles = finished || !needs_finish ? wider : 1;
        if (pointwise) span.ahead = pixels * span.x_pixel;  // the next tile's
        if (finished)
          accumulate<kNarrowPixels, true>(pixels, two, at.x, by.weights, at.y, q.y_stride.w, bias, span);
        else
          accumulate<kNarrowPixels>(pixels, two, at.x, by.weights, at.y, q.y_stride.w, bias, span);
        if (needs_finish && !finished)
          finish<T>(q, at.y, q.y_stride.w, pixels, some.blocks * some.count, by.of.slope, at.residual, at.y);
        const int64_t done = span.tiles * pixels;
        tiles -= span.tiles, count -= done, at = at.from(done * span.x_pixel, done * q.y_stride.w);
      }
    }
  }
  // Those of a row's columns, which see the kernel's rows `valid`.
  void row_tiles(const Operands& image, int64_t row, Range valid, Range columns, const Some& some, bool prefetches) const {
    Span span = whole;
    span.rows = valid.size(), span.ahead = prefetches ? p.stride_h * p.x_stride.h : 0;
    const int64_t top = row * p.stride_h - p.pad_h + valid.begin * p.dilation_h, left = columns.begin * p.stride_w - p.pad_w;
    alike_tiles(p, span, columns.size(),
                image.from(top * p.x_stride.h + left * p.x_stride.w, some.y + row * p.y_stride.h + columns.begin * p.y_stride.w),
                some.by.from(valid.begin * span.w_row), some);
  }
  // Those of a column beside the interior, in rows that see all of the kernel's rows: tiles go down.
  void column_tiles(const Operands& image, Range rows, int64_t column, const Some& some) const {
    const Range seen = seen_from(column);
    Span span = whole;
    span.columns = seen.size(), span.x_pixel = p.stride_h * p.x_stride.h;
    const int64_t top = rows.begin * p.stride_h - p.pad_h, left = column * p.stride_w - p.pad_w + seen.begin * p.dilation_w;
    alike_tiles(turned, span, rows.size(),
                image.from(top * p.x_stride.h + left * p.x_stride.w, some.y + rows.begin * p.y_stride.h + column * p.y_stride.w),
                some.by.from(seen.begin * span.w_column), some);
  }
  // Columns [begin, end) of a row, tile by tile, each by the blocks `of` a group.
  void single_tiles(const Operands& image, int64_t row, int64_t begin, int64_t end, int64_t group, Share of) const {
    const int64_t tiles = ceil_div(end - begin, tile_pixels);
    for (int64_t t = 0; t < tiles; t++) {
      const Share some = share(end - begin, tiles, t);
      for (int64_t block = of.begin; block < of.end; block++)
        tile(image.from(0, y_channel(group, block)), row, begin + some.begin, some.end - some.begin, filters_of(group, block),
             smaller(b.block, filters - block * b.block), prologue.from(group * channels));
    }
  }

  void group_row(const Operands& image, int64_t row, int64_t group) const {
    if constexpr (same<T, A>) {
      const int64_t top = row * p.stride_h - p.pad_h;
      const Range valid = inside(top, p.dilation_h, p.in_height, p.kernel_height);
      const Filters by = filters_of(group, 0);
      const Operands at = image.from((top + valid.begin * p.dilation_h) * p.x_stride.h, y_channel(group, 0) + row * p.y_stride.h);
      const int64_t lanes = smaller(width, p.out_channels - group * filters);
      const GroupRow<A> of{p,
                           at.x,
                           by.weights + valid.begin * whole.w_row,
                           at.y,
                           valid.size(),
                           b.channels,
                           lanes,
                           by.of.bias ? load_some(by.of.bias, lanes) : Vec<A>(A(0))};
      p.stride_w == 1 ? of.template run<1>() : of.template run<2>();
      if (needs_finish) finish<T>(p, at.y, p.y_stride.w, p.out_width, lanes, by.of.slope, at.residual, at.y);
    }
  }

  void take(int64_t i) const {
    const Share rows = tasks.rows(p, i), of = tasks.filters(b, i);
    const int64_t n = tasks.image_and_group(i) / groups, group = tasks.image_and_group(i) % groups;
    const Operands image = operands.from(n * p.x_stride.n + group * channels * p.x_stride.c, n * p.y_stride.n);
    if (has_group_rows) {
      for (int64_t row = rows.begin; row < rows.end; row++) group_row(image, row, group);
      return;
    }
    const Range edge_rows =
        edges_alike ? Range{larger(rows.begin, whole_rows.begin), smaller(rows.end, whole_rows.end)} : Range{0, 0};
    for (int64_t block = of.begin; block < of.end; block += tasks.pass) {
      const Share pass{block, smaller(of.end, block + tasks.pass)};
      for (int64_t row = rows.begin; row < rows.end; row++) {
        const int64_t columns = smaller(p.out_width, all_pixels - row * p.out_width);
        const Range valid = inside(row * p.stride_h - p.pad_h, p.dilation_h, p.in_height, p.kernel_height);
        const int64_t alike_end = valid.size() > 0 ? smaller(interior.end, columns) : 0,
                      alike_begin = smaller(interior.begin, alike_end);
        const bool edges = row < edge_rows.begin || row >= edge_rows.end;
        if (edges) single_tiles(image, row, 0, alike_begin, group, pass);
        if (alike_begin < alike_end)
          each_alike(group, pass, [&](const Some& some) {
            row_tiles(image, row, valid, {alike_begin, alike_end}, some, block == of.begin);
          });
        if (edges) single_tiles(image, row, alike_end, columns, group, pass);
      }
      if (edge_rows.size() > 0)
        for_edges([&](int64_t column) {
          each_alike(group, pass, [&](const Some& some) { column_tiles(image, edge_rows, column, some); });
        });
    }
    if (lines == Lines::past_caches) finish_streaming();
  }

  const Blocking& b;
  const bool pointwise;
  const Conv2dProblem p;     // its pixels regrouped
  const int64_t all_pixels;  // of what is one image in p
  const Operands operands;
  const A* const w;
  const Channels<T> of_channels;
  const Prologue<A> prologue;
  const bool in_place;  // sums are added up in the output; they would go over a residual that is the output
  const bool needs_finish;
  const bool has_group_rows, spread;        // joined_groups.h
  const int64_t groups, channels, filters;  // the latter two of a group
  const bool few;                           // products of an output value
  const Span whole;
  const int64_t tile_pixels;
  const Range interior, whole_rows;  // columns whose tiles are alike; rows that see all of the kernel's
  const bool edges_alike;            // the columns beside the interior are
  const Lines lines;
  Conv2dProblem turned;  // of which a row is a column of p
  const Tasks tasks;
};

template <class T>
void conv2d_direct(const Conv2dProblem& p, const Conv2dOperands& m, Workspace&) {
  const Blocking b(p);
  if (!multiply_pixels<T>(p, b, m)) DirectConvolution<T>(p, b, m).run();
}

// Groups that fill vectors (joined_groups.h) have gradients of their own in NHWC; dX with a stride is PyTorch's, which beats the
// patches of so few channels.
GradientNames gradients(const Conv2dProblem& p) {
  if (!groups_fill_vectors(p) || multiplies_pairs(p) || p.x_stride.c != 1 || p.y_stride.c != 1) return by_patches(p);
  const Conv2dProblem t = transposed(p);
  const bool convolution = p.stride_h == 1 && p.stride_w == 1 && t.pad_h >= 0 && t.pad_w >= 0;
  return {convolution ? "direct" : nullptr, "direct"};
}
int64_t backward_workspace(const Conv2dProblem& p, const WeightedGradients& m) {
  return m.grad_input ? workspace_bytes<char>(packed_bytes(transposed(p))) : 0;
}
void backward(const Conv2dProblem& p, const WeightedGradients& m, Workspace& workspace) {
  with_type(p.dtype, [&]<class T>() {
    const T *gy = m.grad_output.read<T>(), *x = m.input.read<T>();
    if (m.grad_input) {
      const Conv2dProblem t = transposed(p);
      Acc<T>* packed = workspace.take<Acc<T>>(packed_bytes(t) / static_cast<int64_t>(sizeof(Acc<T>)));
      pack_joined_turned(p, m.weight.read<T>(), packed);
      conv2d_direct<T>(t, {gy, packed, nullptr, nullptr, m.grad_input}, workspace);
    }
    if constexpr (AI3_VECTOR_BYTES > 16)
      if (m.grad_weight)
        joined_weight_gradient_of<T>(p.in_channels / p.groups, p, gy, x, m.grad_weight.write<T>(), m.grad_bias.write<T>());
  });
}

Cost cost(const Conv2dProblem& p) {
  const Blocking b(p);
  const bool spread = b.spread(p, groups_have_rows(p));
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

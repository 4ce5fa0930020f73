// Convolution in a transform domain, the frame that Winograd's and the FFT algorithms share. The output is cut into tiles; the
// inputs of a tile and the weights are transformed; in the transform domain the convolution is a product of (tiles x channels)
// and (channels x output channels) matrices, one for each position of the transformed tile; the inverse transform gives the
// outputs. The batch is folded into the tiles. A thread takes a block of them through all three phases, so that what is between
// them stays in its cache ("L3 fusion", Gelashvili et al. 2019); where there are few, all of them, for filters of its own.
//
// A Transform has
//   kExtentH, kExtentW       inputs of a tile on each axis; it gives extent - taps + 1 outputs there
//   kPositions               elements of a transformed tile
//   kMostTapsH, kMostTapsW   taps of a kernel that one tile can take in
//   kForwardFlops, kInverseFlops   a tile and channel
//   forward(in, out), weights(in, out), inverse(in, out, rows, columns)   of one vector of channels; in(u, v) and out(position,
//   value)
// The product is elementwise, so a transform that needs complex products spreads them over several positions.
//
// Words, here and in the pages of docs/decisions:
//   position   an element of a transformed tile; each has a matrix product of its own
//   v          [position][tile of the block][branch, channel]: transformed input, a row for each tile
//   m          [position][tile of the block][filter]: products, before the inverse transform
//   packed     [position][group][panel][branch, channel][filter of the panel]: transformed weights
//   panel      kPanel filters, whose weights lie side by side; slab: kRows tiles, the rows that the micro-kernel takes at once
//   block      tiles that are taken through the phases together; v and m have room for one
#pragma once
#include <type_traits>

#include "../core/epilogue.h"
#include "../core/gemm.h"
#include "../core/rows.h"
#include "../core/streaming.h"
#include "problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

// One axis of a convolution as convolutions of stride and dilation 1. Taps are `dilation` apart and outputs read `stride` apart:
// - outputs `phases` apart see the same sublattice of the inputs, whose points are `spacing` = lcm(stride, dilation) apart;
// - on it, what stride remains is taken away by counting each of its residues as a channel of its own;
// - a kernel with more taps than a tile takes in is cut into parts, which count as channels too.
// A branch is one residue of one part: tap t of branch b is the kernel's tap(b, t).
struct Axis {
  int64_t in, out, kernel, stride, pad, dilation;
  int64_t phases, spacing, residues, inner_stride, taps, branches;
  int64_t tile, tiles_of_phase, tiles;  // outputs of a tile, tiles

  Axis(int64_t in_size, int64_t out_size, int64_t kernel_size, int64_t stride_, int64_t pad_, int64_t dilation_, int64_t extent,
       int64_t most_taps)
      : in(in_size),
        out(known(out_size)),
        kernel(known(kernel_size)),
        stride(known(stride_)),
        pad(pad_),
        dilation(known(dilation_)) {
    const int64_t divisor = greatest_common_divisor(stride, dilation);
    phases = dilation / divisor, inner_stride = stride / divisor, spacing = checked_mul(inner_stride, dilation);
    residues = inner_stride < kernel ? inner_stride : kernel;
    taps = ceil_div(kernel, inner_stride);
    const int64_t parts = ceil_div(taps, most_taps);
    taps = ceil_div(taps, parts), branches = parts * residues;
    tile = extent - taps + 1;
    tiles_of_phase = ceil_div(ceil_div(out, phases), tile);
    tiles = tiles_of_phase * (phases < out ? phases : out);
  }
  // A query may not know a size (-1), or ask about none at all.
  static int64_t known(int64_t size) { return size < 1 ? 1 : size; }
  int64_t tap(int64_t branch, int64_t t) const { return (branch / residues * taps + t) * inner_stride + branch % residues; }
  int64_t first_output(int64_t t) const { return t / tiles_of_phase + t % tiles_of_phase * tile * phases; }
  int64_t outputs(int64_t first) const {
    const int64_t left = first < out ? ceil_div(out - first, phases) : 0;
    return left < tile ? left : tile;
  }
  int64_t first_input(int64_t first, int64_t branch) const { return first * stride - pad + tap(branch, 0) * dilation; }
  // The points of a tile's lattice, `origin` its first, that lie in the input: [begin, end) of [0, extent).
  void inside(int64_t origin, int64_t extent, int64_t& begin, int64_t& end) const {
    begin = origin < 0 ? ceil_div(-origin, spacing) : 0;
    end = origin < in ? ceil_div(in - origin, spacing) : 0;
    if (begin > extent) begin = extent;
    if (end > extent) end = extent;
  }
};

// Zeros of each type, as many as an image may have channels to be padded with them where it lies.
constexpr int kZeroBytes = 8192;
alignas(64) constexpr char zero_bytes[kZeroBytes] = {};
template <class T>
constexpr int64_t kMostPadded = kZeroBytes / sizeof(T);
template <class T>
AI3_INLINE const T* zeros() {
  return reinterpret_cast<const T*>(zero_bytes);
}

// `count` channels that lie `stride` apart; the lanes after them are 0.
template <class T>
AI3_INLINE Vec<Acc<T>> load_channels(const T* p, int64_t stride, int64_t count) {
  if (stride == 1) return count == Vec<Acc<T>>::width ? load(p) : load_partial(p, count);
  Acc<T> lanes[Vec<Acc<T>>::width] = {};
  for (int64_t i = 0; i < count; i++) lanes[i] = widen(p[i * stride]);
  return load(lanes);
}
template <class T>
AI3_INLINE void store_channels(T* p, int64_t stride, int64_t count, Vec<Acc<T>> v) {
  if (stride == 1) return count == Vec<Acc<T>>::width ? store(p, v) : store_partial(p, v, count);
  for (int64_t i = 0; i < count; i++) narrow(v[static_cast<int>(i)], p[i * stride]);
}

// Bias, residual and activation at the store. relu and relu6 are clamps, which cost little in unrolled code; the others but prelu
// are calls.
template <class A>
[[gnu::noinline]] Vec<A> activate_by_call(Activation activation, Vec<A> v) {
  return activate_inline(activation, v);
}
template <class A>
struct Epilogue {
  Vec<A> bias, low, high;
  const A* slope = nullptr;  // of the first of `count` channels
  int64_t count = 0;
  Activation activation;
  bool called;

  Epilogue(Activation a, Vec<A> b)
      : bias(b), low(static_cast<A>(-__builtin_inf())), high(static_cast<A>(__builtin_inf())), activation(a), called(false) {
    if (a == Activation::relu || a == Activation::relu6) low = Vec<A>(A{0});
    if (a == Activation::relu6) high = Vec<A>(A{6});
    called = a != Activation::none && a != Activation::relu && a != Activation::relu6;
  }
  // Where !is_called(activation).
  AI3_INLINE Vec<A> operator()(Vec<A> v) const {
    if (called) return activate_by_call(activation, v);
    const typename Vec<A>::Raw raised = v.raw < low.raw ? low.raw : v.raw;
    return raised > high.raw ? high.raw : raised;
  }
  // Where is_called(activation), of as many channels as a vector has; and of `count`, whatever the activation.
  AI3_INLINE Vec<A> sloped(Vec<A> v) const {
    return activate_stored<true>(activation, v, [&] { return load(slope); });
  }
  AI3_INLINE Vec<A> partial(Vec<A> v) const { return is_called(activation) ? partial_called(v) : (*this)(v); }
  [[gnu::noinline]] Vec<A> partial_called(Vec<A> v) const {
    return activate_stored<true>(activation, v, [&] { return load_channels(slope, 1, count); });
  }
};

// A vector of doubles from, and to, as many elements of the accumulator's type.
typedef float Floats __attribute__((vector_size(AI3_VECTOR_BYTES / 2)));
AI3_INLINE Vec<double> doubles(const double* p) { return load(p); }
AI3_INLINE Vec<double> doubles(const float* p) {
  Floats f;
  __builtin_memcpy(&f, p, sizeof(f));
  return __builtin_convertvector(f, Vec<double>::Raw);
}
AI3_INLINE void store_rounded(double* p, Vec<double> v) { store(p, v); }
AI3_INLINE void store_rounded(float* p, Vec<double> v) {
  const Floats f = __builtin_convertvector(v.raw, Floats);
  __builtin_memcpy(p, &f, sizeof(f));
}
AI3_INLINE void store_rounded(bfloat16* p, Vec<double> v) {
  for (int j = 0; j < Vec<double>::width; j++) narrow(static_cast<float>(v[j]), p[j]);
}

// Rows of the transformed input, times a panel of weights as they are stored.
template <class A, class Stored>
struct TileRows {
  const A* data;
  int64_t stride;
  const Stored* panel;
  AI3_INLINE TileRows from(int64_t row) const { return {data + row * stride, stride, panel}; }
  template <int R, bool half>
  AI3_INLINE void multiply(MicroTile<A, R, half>& tile, const A*, int64_t k, Next next) const {
    tile.multiply(StridedRows<A>{data, stride}.template elements<R>(), panel, k, next);
  }
};

// What a transform reads is a function in(i, j) or in(position), what it writes out(position, value) or out(i, j, value). These
// also have the addresses of neighbours at hand, for transforms in unrolled code, which is slow to find one for each element: all
// that winograd.h's read or write at positions are Positions, and forward takes Pixels or any function.
// A tile's pixels:
template <class T>
struct Pixels {
  const T* from;
  int64_t step_h, step_w;
  struct Columns {  // one after the other
    Apart<const T> rows;
    int64_t step;
    AI3_INLINE Vec<Acc<T>> operator[](int i) const { return load(rows[i]); }
    AI3_INLINE void advance() { rows += step; }
  };
  AI3_INLINE Vec<Acc<T>> operator()(int64_t i, int64_t j) const { return load(from + i * step_h + j * step_w); }
  AI3_INLINE Columns columns() const { return {{from, step_h}, step_w}; }
};
// or those of any function in(i, j);
template <class In>
AI3_INLINE auto columns_of(const In& in) {
  struct Columns {
    const In& in;
    int64_t j = 0;
    AI3_INLINE auto operator[](int i) const { return in(i, j); }
    AI3_INLINE void advance() { j++; }
  };
  if constexpr (requires { in.columns(); })
    return in.columns();
  else
    return Columns{in};
}
// a transformed tile's positions, columns of which are those of a matrix `width` wide;
template <class E>
struct Positions {
  E* at;
  int64_t stride;
  using A = std::remove_const_t<E>;
  struct Row {  // at most 15 of them
    Apart<E> elements;
    AI3_INLINE void put(int j, Vec<A> v) const { store(elements[j], v); }
  };
  AI3_INLINE Vec<A> operator()(int64_t position) const { return load(at + position * stride); }
  AI3_INLINE void operator()(int64_t position, Vec<A> v) const { store(at + position * stride, v); }
  AI3_INLINE Row row(int64_t position) const { return {{at + position * stride, stride}}; }
  AI3_INLINE typename Pixels<A>::Columns columns(int64_t width) const { return {{at, width * stride}, stride}; }
};
// or any function out(position, value).
template <class Out>
struct RowOf {
  const Out& out;
  int64_t first;
  template <class V>
  AI3_INLINE void put(int j, V v) const {
    out(first + j, v);
  }
};
template <class Out>
AI3_INLINE auto row_of(const Out& out, int64_t position) {
  if constexpr (requires { out.row(position); })
    return out.row(position);
  else
    return RowOf<Out>{out, position};
}

// How threads share the work: by blocks of tiles, by filters, or each of the three phases on its own.
enum class Split { tiles, filters, phases };

// Stored: the type of the packed weights.
template <class Transform, class T, class Stored = Acc<T>>
struct TransformDomain {
  using A = Acc<T>;
  using V = Vec<A>;
  static constexpr int64_t kWidth = V::width, kExtentH = Transform::kExtentH, kExtentW = Transform::kExtentW,
                           kPositions = Transform::kPositions;
  // Positions are one cache line more than a multiple of the tiles apart, lest they all fall into one set of the L1 cache.
  static constexpr int64_t kSkew = 64 / static_cast<int64_t>(sizeof(A));

  const Conv2dProblem& p;
  Axis h, w;
  int64_t group_in, group_out, panels, branches, depth;  // depth: of a group's products
  int64_t parts;                                         // of it: with one group its channels follow from branch to branch
  int64_t tiles, row;                                    // elements between tiles of the transformed input and of the products
  int64_t block, blocks;
  Split split;
  int64_t shares;                 // of the panels: 1 unless threads have filters of their own
  int64_t stride, packed_stride;  // elements between positions of them, and of the packed weights
  bool cached;                    // the panels of a position stay in the L1 cache while a block's tiles pass by

  [[gnu::noinline]] explicit TransformDomain(const Conv2dProblem& problem)  // once a call; its saturated sizes are no constants
      : p(problem),
        h(p.in_height, p.out_height, p.kernel_height, p.stride_h, p.pad_h, p.dilation_h, kExtentH, Transform::kMostTapsH),
        w(p.in_width, p.out_width, p.kernel_width, p.stride_w, p.pad_w, p.dilation_w, kExtentW, Transform::kMostTapsW) {
    group_in = p.in_channels / p.groups, group_out = p.out_channels / p.groups;
    panels = ceil_div(group_out, kPanel<A>);
    branches = h.branches * w.branches, depth = checked_mul(branches, group_in);
    parts = p.groups == 1 ? 1 : branches;
    tiles = checked_product({p.batch < 1 ? 1 : p.batch, h.tiles, w.tiles});
    const int64_t v_row = checked_mul(branches, p.in_channels);
    const int64_t m_row =
        round_up(p.out_channels, p.groups == 1 ? kPanel<A> : kWidth);  // with one group whole panels are written
    row = round_up(v_row > m_row ? v_row : m_row, kWidth);
    plan();
    cached = split != Split::phases && p.groups == 1 &&
             checked_product({panels, depth, kPanel<A>, static_cast<int64_t>(sizeof(Stored))}) <= 16 << 10;
    stride = checked_add(checked_mul(block, row), kSkew);
    packed_stride = checked_add(checked_product({p.groups, panels, depth, kPanel<A>}), kSkew);
  }

  // Blocks of tiles whose transforms fill about a core's cache, shared evenly. With too few tiles for that each thread takes them
  // all, for filters of its own: every thread transforms the whole input, which costs less than that cores wait for each other's
  // lines (docs/decisions/threads.md). Where there are no filters for all threads, they share the phases one by one, of blocks
  // that are bounded only so that the workspace is.
  void plan() {
    const int64_t tile_bytes = checked_product({kPositions, row, static_cast<int64_t>(sizeof(A))});
    auto fitting = [&](int64_t bytes, int64_t most) {
      const int64_t n = bytes / tile_bytes;
      return n < 1 ? 1 : n > most ? most : n;
    };
    // Fewer than two slabs of the micro-kernel would read the weights too often, or four where they come from memory, unless
    // tiles are very large.
    const int64_t weight_bytes =
        checked_product({kPositions, p.groups, panels, depth, kPanel<A>, static_cast<int64_t>(sizeof(Stored))});
    const int64_t in_cache = fitting(336 << 10, 56), least = fitting(16 << 20, weight_bytes > 16 << 20 ? 56 : 28),
                  small = larger(in_cache, least);
    // A thread with a block of its own reads all weights; one that shares the phases, what the others have written of the tiles,
    // which is some times slower.
    const bool few = tiles < p.threads * (small < 14 ? small : 14), tiny = tiles < p.threads * 8;
    const double read = static_cast<double>(group_in) * static_cast<double>(p.out_channels) * p.threads,
                 exchanged = 4. * static_cast<double>(tiles) * static_cast<double>(p.in_channels + p.out_channels);
    // With filters of their own all threads transform the whole input: that must be little beside a thread's products.
    const double transform = 6. * Transform::kForwardFlops * p.threads,
                 products = 2. * kPositions * static_cast<double>(panels * kPanel<A>);
    const bool divisible = p.threads > 1 && p.groups == 1 && panels >= p.threads && transform <= products &&
                           round_up(panels, p.threads) <= panels + panels / 8;
    // A weight that was packed just now is in the caches of those who packed it: they multiply it where it is the larger operand.
    const bool packed_here = divisible && p.packed_for_call && tiles <= p.out_channels / 4;
    split = p.threads <= 1 || ((!few || (!tiny && read <= exchanged)) && !packed_here) ? Split::tiles
            : divisible                                                                ? Split::filters
                                                                                       : Split::phases;
    shares = split == Split::filters ? p.threads : 1;
    blocks = ceil_div(tiles, split == Split::phases ? fitting(48 << 20, tiles) : small);
    if (split == Split::tiles && p.threads > 1) blocks = round_up(blocks, p.threads);
    block = ceil_div(tiles, blocks), blocks = ceil_div(tiles, block);
  }

  int64_t packed_elements() const { return checked_mul(kPositions, packed_stride); }
  // A thread that takes a block through all phases puts the products of a position where the transformed input of the position
  // before was: v is m, one position later. Threads that share a block work on many positions at once, and v follows m.
  int64_t v_offset() const { return checked_mul(split == Split::phases ? kPositions : 1, stride); }
  int64_t block_elements() const { return checked_add(v_offset(), checked_mul(kPositions, stride)); }
  int64_t copies() const { return split == Split::phases ? 1 : smaller(p.threads, larger(blocks, shares)); }
  int64_t workspace() const { return workspace_bytes<A>(checked_mul(copies(), block_elements())); }

  // ---- weights, in double; `turned` as the transposed convolution has them: channels and filters exchanged, by 180 degrees ----
  void pack(const T* weight, Stored* packed, bool turned = false) const {
    using D = Vec<double>;
    constexpr int64_t kStaged = 32;  // taps that are first brought side by side for a panel's filters
    const int64_t taps = p.kernel_height * p.kernel_width, apart = turned ? taps : group_in * taps;
    parallel_ranges(p.threads, p.groups * panels * depth, 16, [&](int64_t begin, int64_t end, int) {
      alignas(64) A stage[kStaged * kPanel<A>];
      for (int64_t i = begin; i < end; i++) {
        const int64_t group = i / depth / panels, panel = i / depth % panels, branch = i % depth / group_in, c = i % group_in;
        const int64_t first = panel * kPanel<A>, left = group_out - first;
        const T* at =
            weight + (turned ? (group * group_in + c) * group_out + first : (group * group_out + first) * group_in + c) * taps;
        for (int64_t e = 0; left < kPanel<A> && e < kStaged * kPanel<A>; e++) stage[e] = 0;
        if (taps <= kStaged) copy_rows(at, 1, apart, taps, smaller(left, kPanel<A>), stage, kPanel<A>);
        int64_t taken[kExtentH][kExtentW];  // the branch's taps, -1: none
        for (int64_t u = 0; u < kExtentH; u++)
          for (int64_t v = 0; v < kExtentW; v++) {
            const int64_t r = h.tap(branch / w.branches, u), s = w.tap(branch % w.branches, v), t = r * p.kernel_width + s;
            const bool none = u >= h.taps || v >= w.taps || r >= p.kernel_height || s >= p.kernel_width;
            taken[u][v] = none ? -1 : turned ? taps - 1 - t : t;
          }
        for (int64_t lane = 0; lane < kPanel<A>; lane += D::width) {
          auto tap = [&](int64_t u, int64_t v) {
            D value = 0.;
            const int64_t from = taken[u][v];
            if (from < 0) return value;
            if (taps <= kStaged) return doubles(stage + from * kPanel<A> + lane);
            for (int j = 0; j < D::width && lane + j < left; j++) value.raw[j] = widen(at[(lane + j) * apart + from]);
            return value;
          };
          Transform::weights(tap, [&](int64_t position, D value) {
            store_rounded(packed + position * packed_stride + i * kPanel<A> + lane, value);
          });
        }
      }
    });
    for (int64_t position = 1; position <= kPositions; position++)
      for (int64_t i = 1; i <= kSkew; i++) packed[position * packed_stride - i] = Stored{};
  }

  // ---- the three phases; v and m hold one block ----
  // Channels [begin, end) of tile t into row `slot` of v. What lies outside the image is 0.
  void transform_input(const T* x, A* v, int64_t t, int64_t slot, int64_t begin, int64_t end) const {
    const int64_t oh = h.first_output(t / w.tiles % h.tiles), ow = w.first_output(t % w.tiles);
    const T* image = x + t / (w.tiles * h.tiles) * p.x_stride.n;
    const int64_t step_h = h.spacing * p.x_stride.h, step_w = w.spacing * p.x_stride.w;
    for (int64_t branch = 0; branch < branches; branch++) {
      const int64_t ih = h.first_input(oh, branch / w.branches), iw = w.first_input(ow, branch % w.branches);
      int64_t top, bottom, left, right;
      h.inside(ih, kExtentH, top, bottom), w.inside(iw, kExtentW, left, right);
      const T* from = image + ih * p.x_stride.h + iw * p.x_stride.w;
      A* to = v + slot * row + branch * p.in_channels;
      int64_t c = begin;
      const bool vectors = p.x_stride.c == 1 && begin + kWidth <= end;
      if (vectors && top == 0 && left == 0 && bottom == kExtentH && right == kExtentW) {
        for (; c + kWidth <= end; c += kWidth)
          Transform::forward(Pixels<T>{from + c, step_h, step_w}, Positions<A>{to + c, stride});
      } else if (vectors && p.in_channels <= kMostPadded<T>) {  // an edge tile reads zeros outside
        const T* at[kExtentH][kExtentW];
        for (int64_t i = 0; i < kExtentH; i++)
          for (int64_t j = 0; j < kExtentW; j++)
            at[i][j] = i >= top && i < bottom && j >= left && j < right ? from + i * step_h + j * step_w : zeros<T>();
        for (; c + kWidth <= end; c += kWidth)
          Transform::forward([&](int64_t i, int64_t j) { return load(at[i][j] + c); }, Positions<A>{to + c, stride});
      }
      if (c >= end) continue;
      V tile[kExtentH][kExtentW] = {};
      for (; c < end; c += kWidth) {
        const int64_t count = smaller(kWidth, end - c);
        for (int64_t i = top; i < bottom; i++)
          for (int64_t j = left; j < right; j++)
            tile[i][j] = load_channels(from + i * step_h + j * step_w + c * p.x_stride.c, p.x_stride.c, count);
        Transform::forward([&](int64_t i, int64_t j) { return tile[i][j]; },
                           [&](int64_t position, V value) { store_channels(to + position * stride + c, 1, count, value); });
      }
    }
  }

  // The input of a thread's next block of tiles, prefetched evenly over the turns in which it multiplies this one: in each at
  // most one row of the pixels that a tile adds to those of its neighbours. Prefetched all at once they keep the products
  // waiting.
  struct Ahead {
    const TransformDomain& d;
    const T* x;
    int64_t first, rows, turns;  // tile; rows of pixels of all tiles
    int64_t step;                // bytes for each element of k
    int64_t due = 0, asked = 0;  // due: rows a turn, in turns
    const T* line = nullptr;     // of the tile's first row that is new
    int64_t top = 0;             // its place in the image

    AI3_INLINE Next next() {
      const Next nothing{reinterpret_cast<const char*>(x), 0};
      due += rows;
      if (due < turns || asked == rows) return nothing;
      due -= turns;
      const int64_t r = asked % d.h.tile, t = first + asked / d.h.tile;
      asked++;
      if (r == 0) {
        top = d.h.first_input(d.h.first_output(t / d.w.tiles % d.h.tiles), 0) + kExtentH - d.h.tile;  // below its neighbour's
        line = x + t / (d.w.tiles * d.h.tiles) * d.p.x_stride.n + top * d.p.x_stride.h +
               larger(0, d.w.first_input(d.w.first_output(t % d.w.tiles), 0)) * d.p.x_stride.w;
      }
      if (top + r < 0 || top + r >= d.p.in_height) return nothing;
      return {reinterpret_cast<const char*>(line + r * d.p.x_stride.h), step};
    }
  };
  // For n tiles from `first` on; none where a row of a tile's pixels is no run of memory, or too long for a turn, which
  // prefetches two lines with each element of k.
  Ahead ahead_of(const T* x, int64_t first, int64_t n, int64_t tiles_now) const {
    const int64_t slabs = ceil_div(tiles_now, kRows),
                  turns = kPositions * p.groups * ceil_div(panels, shares) * parts * (cached ? slabs : slabs - 1);
    const int64_t step = w.tile * p.in_channels * static_cast<int64_t>(sizeof(T)) * parts / depth;
    const bool runs = p.x_stride.c == 1 && p.x_stride.w == p.in_channels && h.spacing == 1 && w.spacing == 1 && step <= 128;
    return {*this, x, first, n > 0 && runs ? n * h.tile : 0, larger(1, turns), step};
  }

  // `count` rows times a panel.
  template <class Rows>
  AI3_INLINE void product(const Rows& rows, int64_t count, int64_t k, A* to, Next next) const {
    multiply_tile<A, true>(
        count, rows, static_cast<const A*>(nullptr), k,
        Tile<A>{zeros<A>(), 0, to, row, reinterpret_cast<const char*>(to), row * static_cast<int64_t>(sizeof(A)), next});
  }
  // One panel of the products of one position, `rows` tiles; `index` counts the panels `own`.
  [[gnu::noinline]] void multiply(const A* v, const Stored* packed, A* m, int64_t rows, int64_t index, const Share& own,
                                  Ahead& ahead) const {
    const int64_t count = own.end - own.begin, panel = own.begin + index % count, group = index / count % p.groups,
                  position = index / count / p.groups;
    const int64_t column = group * group_out + index % count * kPanel<A>, left = group_out - panel * kPanel<A>;
    const int64_t columns = p.groups == 1 || left > kPanel<A> ? kPanel<A> : left;
    const Stored* panel_at = packed + position * packed_stride + (group * panels + panel) * depth * kPanel<A>;
    Output<A> out{m + position * stride + column, row};
    constexpr int64_t kSpread = 16;
    const int64_t length = depth / parts, slabs = ceil_div(rows, kRows), bytes = kPanel<A> * static_cast<int64_t>(sizeof(Stored));
    for (int64_t part = 0; part < parts; part++, out.add = true, panel_at += length * kPanel<A>) {
      const TileRows<A, Stored> from{v + position * stride + part * p.in_channels + group * group_in, row, panel_at};
      // The panel behind this one is multiplied next: it is prefetched over all slabs or, where other turns are for the input,
      // one.
      const int64_t others = panel + 1 == own.end && part + 1 == parts ? (panels - count) * depth * kPanel<A> + kSkew : 0;
      const char* panel_next = reinterpret_cast<const char*>(panel_at + length * kPanel<A> + others);
      const int64_t turns = ahead.rows > 0 ? 1 : smaller(slabs, kSpread), step = bytes / turns;
      for (int64_t s = 0; s < slabs; s++) {
        const Share r = share(rows, slabs, s);
        const Next next = s < turns ? Next{panel_next + s * step * length, step} : ahead.next();
        if (columns == kPanel<A> && !out.add)
          product(from.from(r.begin), r.end - r.begin, length, out.data + r.begin * row, next);
        else
          multiply_slab<A>(from.from(r.begin), r.end - r.begin, static_cast<const A*>(nullptr), columns, length,
                           out.from(r.begin, 0), next);
      }
    }
  }
  // The panels `own` of a position, where they stay in the L1 cache.
  [[gnu::noinline]] void multiply_cached(const A* v, const Stored* packed, A* m, int64_t rows, int64_t position, const Share& own,
                                         Ahead& ahead) const {
    const Stored* at = packed + position * packed_stride + own.begin * depth * kPanel<A>;
    const int64_t slabs = ceil_div(rows, kRows);
    for (int64_t s = 0; s < slabs; s++) {
      const Share r = share(rows, slabs, s);
      const int64_t first = position * stride + r.begin * row;
      for (int64_t q = 0; q < own.end - own.begin; q++) {
        const TileRows<A, Stored> from{v + first, row, at + q * depth * kPanel<A>};
        product(from, r.end - r.begin, depth, m + first + q * kPanel<A>, ahead.next());
      }
    }
  }

  // Larger outputs go past the caches, so that no line is read before it is written (docs/decisions/winograd.md).
  bool streams(const void* output) const {
    constexpr int64_t least = int64_t{3} << 19;  // bytes
    return sizeof(T) == sizeof(A) && has_whole_lines<T>(p.y_stride, output) &&
           checked_product({p.batch, p.out_height, p.out_width, p.out_channels, static_cast<int64_t>(sizeof(T))}) >= least;
  }
  // Where a tile's outputs go; plain: neither residual nor activation; sloped: the activations that is_called() names; edge: a
  // tile of which only some rows and columns lie in the output.
  enum class Finish { general, sloped, plain, plain_past_caches };
  template <Finish finish, bool edge = false>
  struct Outputs {
    const Epilogue<A>& epilogue;
    T* y;
    int64_t step_h, step_w;
    bool streaming, added;  // whether there is a residual, and
    intptr_t residual;      // how many bytes behind y
    int64_t rows, columns;  // that lie in the output
    AI3_INLINE void put(T* to, V v) const {
      v += epilogue.bias;
      constexpr bool any = finish == Finish::general || finish == Finish::sloped;
      if constexpr (any) {
        if (added) v += load(reinterpret_cast<const T*>(reinterpret_cast<intptr_t>(to) + residual));
        v = finish == Finish::sloped ? epilogue.sloped(v) : epilogue(v);
      }
      const bool past_caches = any ? streaming : finish == Finish::plain_past_caches;
      past_caches ? store_streaming(to, v) : store(to, v);
    }
    struct Row {
      const Outputs& outputs;
      Apart<T> elements;
      int64_t columns;
      AI3_INLINE void put(int j, V v) const {
        if (!edge || j < columns) outputs.put(elements[j], v);
      }
    };
    AI3_INLINE Row row(int64_t i) const { return {*this, {y + i * step_h, step_w}, edge && i >= rows ? 0 : columns}; }
    AI3_INLINE void operator()(int64_t i, int64_t j, V v) const {
      if (!edge || (i < rows && j < columns)) put(y + i * step_h + j * step_w, v);
    }
  };
  // Output channels [begin, end) of tile t from row `slot` of m, which starts with channel `first`.
  void transform_output(const A* m, const Conv2dOperands& buffers, int64_t t, int64_t slot, int64_t first, int64_t begin,
                        int64_t end, bool streaming) const {
    const int64_t oh = h.first_output(t / w.tiles % h.tiles), ow = w.first_output(t % w.tiles);
    const int64_t rows = h.outputs(oh), columns = w.outputs(ow), step_h = h.phases * p.y_stride.h,
                  step_w = w.phases * p.y_stride.w;
    const int64_t start = t / (w.tiles * h.tiles) * p.y_stride.n + oh * p.y_stride.h + ow * p.y_stride.w;
    const bool whole = rows == h.tile && columns == w.tile;
    const T* bias = buffers.bias.read<T>();
    const A* slope = buffers.slope.read<A>();
    Epilogue<A> epilogue(p.activation, V(A{0}));
    for (int64_t k = begin; k < end; k += kWidth) {
      const int64_t count = smaller(kWidth, end - k), shift = start + k * p.y_stride.c;
      if (bias) epilogue.bias = load_channels(bias + k, 1, count);
      epilogue.slope = slope ? slope + k : nullptr, epilogue.count = count;
      const T* residual = buffers.residual ? buffers.residual.read<T>() + shift : nullptr;
      T* y = buffers.output.write<T>() + shift;
      const Positions<const A> in{m + slot * row + k - first, stride};
      auto finished = [&]<Finish finish, bool edge = false>() {
        const intptr_t apart = reinterpret_cast<intptr_t>(residual) - reinterpret_cast<intptr_t>(y);
        const Outputs<finish, edge> to{epilogue, y, step_h, step_w, streaming, residual != nullptr, apart, rows, columns};
        Transform::inverse(in, to, rows, columns);
      };
      constexpr bool kUnrolled = kPositions <= 64;  // more of a longer transform would only be more code
      constexpr bool kStreams = sizeof(T) == sizeof(A) && AI3_VECTOR_BYTES == 64;
      if (p.y_stride.c == 1 && count == kWidth) {
        if (is_called(p.activation))
          whole ? finished.template operator()<Finish::sloped>() : finished.template operator()<Finish::sloped, true>();
        else if (!whole)
          finished.template operator()<Finish::general, true>();
        else if (!kUnrolled || residual || p.activation != Activation::none)
          finished.template operator()<Finish::general>();
        else if constexpr (kUnrolled && kStreams)
          streaming ? finished.template operator()<Finish::plain_past_caches>() : finished.template operator()<Finish::plain>();
        else if constexpr (kUnrolled)
          finished.template operator()<Finish::plain>();
      } else {
        Transform::inverse(
            in,
            [&](int64_t i, int64_t j, V value) {
              if (i >= rows || j >= columns) return;
              value += epilogue.bias;
              if (residual) value += load_channels(residual + i * step_h + j * step_w, p.y_stride.c, count);
              store_channels(y + i * step_h + j * step_w, p.y_stride.c, count, epilogue.partial(value));
            },
            rows, columns);
      }
    }
  }

  // Vectors multiplied, or as much work: of a vector of a tile's input channels, of a panel of a position for n tiles, of a
  // vector of a tile's output channels.
  double forward_size() const { return Transform::kForwardFlops / 2 * static_cast<double>(branches); }
  double panel_size(int64_t n) const { return 2. * static_cast<double>(n * depth); }
  double inverse_size() const { return Transform::kInverseFlops / 2; }

  void run(const Conv2dOperands& buffers, Workspace& workspace) const {
    const T* x = buffers.input.read<T>();
    const Stored* packed = buffers.weight.read<Stored>();
    const bool streaming = streams(buffers.output.data);
    A* const buffer = workspace.take<A>(copies() * block_elements());
    // body(tile, first, last) for the vectors of channels [begin, end), counted through the tiles of a block.
    auto by_tiles = [](int64_t begin, int64_t end, int64_t channels, const auto& body) {
      const int64_t vectors = ceil_div(channels, kWidth);
      for (int64_t tile = begin / vectors; tile * vectors < end; tile++)
        body(tile, larger(0, begin - tile * vectors) * kWidth, smaller(channels, (end - tile * vectors) * kWidth));
    };
    // The filters of the panels `own`; `later`: the first tile that this thread takes next.
    auto take_block = [&](int64_t b, int64_t later, int64_t copy, const Share& own, const auto& ranges) {
      A *m = buffer + copy * block_elements(), *v = m + v_offset();
      const int64_t first = b * block, n = smaller(block, tiles - first), channel = own.begin * kPanel<A>,
                    channels = own.end == panels ? p.out_channels - channel : own.end * kPanel<A> - channel;
      auto forward = [&](int64_t begin, int64_t end) {
        by_tiles(begin, end, p.in_channels,
                 [&](int64_t i, int64_t c, int64_t last) { transform_input(x, v, first + i, i, c, last); });
      };
      ranges(n * ceil_div(p.in_channels, kWidth), forward, forward_size());
      auto products = [&](int64_t begin, int64_t end) {
        Ahead ahead = ahead_of(x, later, smaller(block, tiles - later), n);
        for (int64_t i = begin; i < end; i++)
          cached ? multiply_cached(v, packed, m, n, i, own, ahead) : multiply(v, packed, m, n, i, own, ahead);
      };
      ranges(kPositions * (cached ? 1 : p.groups * (own.end - own.begin)), products, panel_size(n));
      auto inverse = [&](int64_t begin, int64_t end) {
        by_tiles(begin, end, channels, [&](int64_t i, int64_t k, int64_t last) {
          transform_output(m, buffers, first + i, i, channel, channel + k, channel + last, streaming);
        });
        if (streaming) finish_streaming();
      };
      ranges(n * ceil_div(channels, kWidth), inverse, inverse_size());
    };
    const Share all{0, panels};
    auto alone = [](int64_t count, const auto& body, double) { body(0, count); };
    auto together = [&](int64_t count, const auto& body, double size) {
      parallel_ranges(
          p.threads, count, 1, [&](int64_t begin, int64_t end, int) { body(begin, end); }, size);
    };
    // Of n tiles with the filters of some panels.
    auto size_of_tiles = [&](int64_t n, const Share& own) {
      const double filters = static_cast<double>(own.end - own.begin);
      return static_cast<double>(n * ceil_div(p.in_channels, kWidth)) * forward_size() +
             static_cast<double>(kPositions * p.groups) * filters * panel_size(n) +
             static_cast<double>(n * p.groups) * 2 * filters * inverse_size();
    };
    if (split == Split::tiles) {
      auto task = [&](int64_t b, int thread) {
        const Share mine = share(blocks, team_of(p.threads, blocks), thread);
        take_block(b, b >= mine.begin && b + 1 < mine.end ? (b + 1) * block : tiles, thread, all, alone);
      };
      parallel_for(p.threads, blocks, task, [&](int64_t b) { return size_of_tiles(smaller(block, tiles - b * block), all); });
    } else if (split == Split::filters) {
      auto task = [&](int64_t i, int) {
        for (int64_t b = 0; b < blocks; b++) take_block(b, (b + 1) * block, i, share(panels, shares, i), alone);
      };
      parallel_for(p.threads, shares, task, [&](int64_t i) { return size_of_tiles(tiles, share(panels, shares, i)); });
    } else
      for (int64_t b = 0; b < blocks; b++) take_block(b, tiles, 0, all, together);
  }

  Cost cost() const {
    const double n = static_cast<double>(tiles), size = sizeof(T);
    return {n * (2. * kPositions * static_cast<double>(p.groups * panels * kPanel<A>) * static_cast<double>(depth) +
                 Transform::kForwardFlops * static_cast<double>(branches * p.in_channels) +
                 Transform::kInverseFlops * static_cast<double>(p.out_channels)),
            size * static_cast<double>(p.batch) *
                    (static_cast<double>(p.in_channels) * static_cast<double>(p.in_height) * static_cast<double>(p.in_width) +
                     static_cast<double>(p.out_channels) * static_cast<double>(p.out_height) * static_cast<double>(p.out_width)) +
                sizeof(Stored) * static_cast<double>(packed_elements()),
            .85};
  }
};

// The traits of an algorithm with Transform; StoredAs<A> is the type of its packed weights for the accumulator type A.
template <class A>
using AsComputed = A;
template <class Transform, template <class> class StoredAs = AsComputed>
struct TransformDomainTraits {
  template <class T>
  using Domain = TransformDomain<Transform, T, StoredAs<Acc<T>>>;

  static int64_t workspace(const Conv2dProblem& p) {
    return with_type(p.dtype, [&]<class T>() { return Domain<T>(p).workspace(); });
  }
  static int64_t packed_bytes(const Conv2dProblem& p) {
    return with_type(p.dtype, [&]<class T>() {
      return checked_mul(Domain<T>(p).packed_elements(), static_cast<int64_t>(sizeof(StoredAs<Acc<T>>)));
    });
  }
  static void pack(const Conv2dProblem& p, const void* weight, void* packed) {
    with_type(p.dtype,
              [&]<class T>() { Domain<T>(p).pack(static_cast<const T*>(weight), static_cast<StoredAs<Acc<T>>*>(packed)); });
  }
  static Cost cost(const Conv2dProblem& p) {
    return with_type(p.dtype, [&]<class T>() { return Domain<T>(p).cost(); });
  }
};

// The same where the problem decides on the transform: Choice::with(p, body) calls body.operator()<Transform>().
template <class Choice>
struct ChosenTransformTraits {
  template <class T>
  static void run(const Conv2dProblem& p, const Conv2dOperands& buffers, Workspace& workspace) {
    Choice::with(p, [&]<class Transform>() { TransformDomain<Transform, T>(p).run(buffers, workspace); });
  }
  static int64_t workspace(const Conv2dProblem& p) {
    return Choice::with(p, [&]<class Transform>() { return TransformDomainTraits<Transform>::workspace(p); });
  }
  static int64_t packed_bytes(const Conv2dProblem& p) {
    return Choice::with(p, [&]<class Transform>() { return TransformDomainTraits<Transform>::packed_bytes(p); });
  }
  static void pack(const Conv2dProblem& p, const void* weight, void* packed) {
    Choice::with(p, [&]<class Transform>() { TransformDomainTraits<Transform>::pack(p, weight, packed); });
  }
  static Cost cost(const Conv2dProblem& p) {
    return Choice::with(p, [&]<class Transform>() { return TransformDomainTraits<Transform>::cost(p); });
  }
};

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

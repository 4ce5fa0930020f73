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
//
// What depends neither on the transform nor on the tensors' type (the plan, the products, the loops over blocks) is compiled
// once, in transform_domain.cpp. A transform is compiled for the types of sums; only float32 has forms of its own that read and
// write an image where it lies. Other tensors, edges and rare activations go through a tile in the L1 cache.
#pragma once
#include <type_traits>

#include "../core/epilogue.h"
#include "../core/instances.h"
#include "../core/streaming.h"
#include "problem.h"

namespace ai3::inline AI3_LEVEL {

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
inline constexpr int kZeroBytes = 8192;
alignas(64) inline constexpr char zero_bytes[kZeroBytes] = {};
template <class T>
inline constexpr int64_t kMostPadded = kZeroBytes / sizeof(T);
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
  // Of `count` channels, whatever the activation.
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

// A transform in numbers, and the bytes of what sums and packed weights are stored in.
struct TransformSizes {
  int64_t extent_h, extent_w, positions, most_taps_h, most_taps_w;
  double forward_flops, inverse_flops;
  int64_t sum_bytes, stored_bytes;

  AI3_INLINE int64_t width() const { return AI3_VECTOR_BYTES / sum_bytes; }
  AI3_INLINE int64_t panel() const { return 2 * width(); }
  // Positions are one cache line more than a multiple of the tiles apart, lest they all fall into one set of the L1 cache.
  AI3_INLINE int64_t skew() const { return 64 / sum_bytes; }
};
template <class Transform>
AI3_INLINE TransformSizes sizes_of(int64_t sum_bytes, int64_t stored_bytes) {
  return {Transform::kExtentH,   Transform::kExtentW,      Transform::kPositions,    Transform::kMostTapsH,
          Transform::kMostTapsW, Transform::kForwardFlops, Transform::kInverseFlops, sum_bytes,
          stored_bytes};
}

// What is known before any data: how the image is cut into tiles, and tiles into blocks.
struct DomainPlan {
  const Conv2dProblem& p;
  TransformSizes sizes;
  Axis h, w;
  int64_t group_in, group_out, panels, branches, depth;  // depth: of a group's products
  int64_t parts;                                         // of it: with one group its channels follow from branch to branch
  int64_t tiles, row;                                    // elements between tiles of the transformed input and of the products
  int64_t block, blocks;
  Split split;
  int64_t shares;                 // of the panels: 1 unless threads have filters of their own
  int64_t stride, packed_stride;  // elements between positions of them, and of the packed weights
  bool cached;                    // the panels of a position stay in the L1 cache while a block's tiles pass by

  DomainPlan(const Conv2dProblem& problem, const TransformSizes& transform);
  void plan();

  int64_t packed_elements() const { return checked_mul(sizes.positions, packed_stride); }
  // A thread that takes a block through all phases puts the products of a position where the transformed input of the position
  // before was: v is m, one position later. Threads that share a block work on many positions at once, and v follows m.
  int64_t v_offset() const { return checked_mul(split == Split::phases ? sizes.positions : 1, stride); }
  int64_t block_elements() const { return checked_add(v_offset(), checked_mul(sizes.positions, stride)); }
  int64_t copies() const { return split == Split::phases ? 1 : smaller(p.threads, larger(blocks, shares)); }
  int64_t workspace() const { return workspace_bytes<char>(checked_product({copies(), block_elements(), sizes.sum_bytes})); }
  Cost cost() const;
};

// Taps of a filter panel's weights for a transform in double, in(u, v) of one vector of filters; those that a branch does not
// have are 0.
struct Taps {
  static constexpr int64_t kMost = 256;
  DType dtype;
  int64_t rows[kMost], columns[kMost];  // the kernel's, of the branch's; -1: none
  int64_t kernel_width, taps;
  bool turned;                  // by 180 degrees
  const void *stage, *weights;  // of as many filters side by side, in the type of sums, where the kernel's taps are few
  int64_t step, apart, lane, left;

  Vec<double> gathered(int64_t tap) const;
  template <class A>
  AI3_INLINE Vec<double> at(int64_t u, int64_t v) const {
    if (rows[u] < 0 || columns[v] < 0) return 0.;
    const int64_t t = rows[u] * kernel_width + columns[v], tap = turned ? taps - 1 - t : t;
    return stage ? doubles(static_cast<const A*>(stage) + tap * step + lane) : gathered(tap);
  }
};
// Packs a weight, whose vectors of filters `transform` takes to each position; `turned` as the transposed convolution has them:
// channels and filters exchanged, by 180 degrees.
template <class Stored>
using WeightTransform = void (*)(const Taps& taps, Stored* to, int64_t stride);
template <class A, class Stored>
void pack_domain(const DomainPlan& d, const void* weight, Stored* packed, bool turned, WeightTransform<Stored> transform);

// The phases before and after the products, of a TransformDomain.
struct Phases {
  // Channels [begin, end) of tile t into row `slot` of v.
  void (*input)(const DomainPlan& d, const void* x, void* v, int64_t t, int64_t slot, int64_t begin, int64_t end);
  // Output channels [begin, end) of tile t from row `slot` of m, which starts with channel `first`.
  void (*output)(const DomainPlan& d, const void* m, const Conv2dOperands& operands, int64_t t, int64_t slot, int64_t first,
                 int64_t begin, int64_t end, bool streaming);
};
template <class A, class Stored>
void run_domain(const DomainPlan& d, const Phases& phases, const Conv2dOperands& operands, bool streaming, Workspace& workspace);

// What follows the inverse transform of a tile, where it lies in memory, `pitch` vectors a row: bias, residual, activation. In
// NCHW the columns of each channel follow one another: squares of them and channels are transposed in registers.
template <class T>
struct TileOutput {
  using A = Acc<T>;
  const Epilogue<A>& epilogue;
  T* y;
  const T* residual;
  int64_t step_h, step_w, channel_step, rows, columns;

  AI3_INLINE void put(int64_t i, int64_t j, Vec<A> v) const {
    v += epilogue.bias;
    if (residual) v += load_channels(residual + i * step_h + j * step_w, channel_step, epilogue.count);
    store_channels(y + i * step_h + j * step_w, channel_step, epilogue.count, epilogue.partial(v));
  }
  [[gnu::noinline]] void put_called(int64_t i, int64_t j, Vec<A> v) const { put(i, j, v); }
};
template <class T>
void finish_tile(const TileOutput<T>& to, const Vec<Acc<T>>* tile, int64_t pitch);

// ---- a transform, for sums of type A ----

// `vectors` of channels that follow each other.
template <class Transform, class A>
[[gnu::noinline]] void forward_vectors(const A* from, int64_t step_h, int64_t step_w, A* to, int64_t stride, int64_t vectors) {
  for (; vectors > 0; vectors--, from += Vec<A>::width, to += Vec<A>::width)
    Transform::forward(Pixels<A>{from, step_h, step_w}, Positions<A>{to, stride});
}
// The first `count` channels of a vector.
template <class Transform, class A>
[[gnu::noinline]] void forward_some(const A* from, int64_t step_h, int64_t step_w, A* to, int64_t stride, int64_t count) {
  Transform::forward(Pixels<A>{from, step_h, step_w},
                     [&](int64_t position, Vec<A> v) { store_channels(to + position * stride, 1, count, v); });
}
template <class Transform, class A>
[[gnu::noinline]] void inverse_vector(const A* m, int64_t stride, Vec<A>* tile) {
  Transform::inverse(
      Positions<const A>{m, stride}, [&](int64_t i, int64_t j, Vec<A> v) { tile[i * Transform::kOutputsW + j] = v; },
      Transform::kOutputsH, Transform::kOutputsW);
}
template <class Transform, class A, class Stored>
void transform_weights(const Taps& taps, Stored* to, int64_t stride) {
  Transform::weights([&](int64_t u, int64_t v) { return taps.at<A>(u, v); },
                     [&](int64_t position, Vec<double> value) { store_rounded(to + position * stride, value); });
}

// Stored: the type of the packed weights.
template <class Transform, class T, class Stored = Acc<T>>
struct TransformDomain : DomainPlan {
  using A = Acc<T>;
  using V = Vec<A>;
  static constexpr int64_t kWidth = V::width, kExtentH = Transform::kExtentH, kExtentW = Transform::kExtentW,
                           kPositions = Transform::kPositions;
  static constexpr int64_t kSkew = 64 / static_cast<int64_t>(sizeof(A));
  // Winograd's: tiles are small, and convolutions have stride 1.
  static constexpr bool kUnrolled = requires { Transform::kOutputsH; };

  explicit TransformDomain(const Conv2dProblem& problem) : DomainPlan(problem, sizes_of<Transform>(sizeof(A), sizeof(Stored))) {}

  void pack(const T* weight, Stored* packed, bool turned = false) const {
    pack_domain<A, Stored>(*this, weight, packed, turned, transform_weights<Transform, A, Stored>);
  }

  // What lies outside the image is 0.
  void transform_input(const T* x, A* v, int64_t t, int64_t slot, int64_t begin, int64_t end) const {
    const int64_t oh = h.first_output(t / w.tiles % h.tiles), ow = w.first_output(t % w.tiles);
    const T* image = x + t / (w.tiles * h.tiles) * p.x_stride.n;
    const int64_t step_h = h.spacing * p.x_stride.h, step_w = w.spacing * p.x_stride.w;
    for (int64_t branch = 0; branch < branches; branch++) {
      const int64_t ih = h.first_input(oh, branch / w.branches), iw = w.first_input(ow, branch % w.branches);
      int64_t top, bottom, left, right;
      h.inside(ih, kExtentH, top, bottom), w.inside(iw, kExtentW, left, right);
      const bool whole = top == 0 && left == 0 && bottom == kExtentH && right == kExtentW;
      const T* from = image + ih * p.x_stride.h + iw * p.x_stride.w;
      A* to = v + slot * row + branch * p.in_channels;
      int64_t c = begin;
      if constexpr (sizeof(T) == sizeof(A))
        if (const int64_t vectors = (end - begin) / kWidth; whole && p.x_stride.c == 1 && vectors > 0) {
          forward_vectors<Transform>(from + c, step_h, step_w, to + c, stride, vectors);
          c += vectors * kWidth;
        }
      if constexpr (std::is_same_v<T, float>)
        if (!whole && p.x_stride.c == 1 && begin + kWidth <= end && p.in_channels <= kMostPadded<T>) {  // reads zeros outside
          const T* at[kExtentH][kExtentW];
          for (int64_t i = 0; i < kExtentH; i++)
            for (int64_t j = 0; j < kExtentW; j++)
              at[i][j] = i >= top && i < bottom && j >= left && j < right ? from + i * step_h + j * step_w : zeros<T>();
          for (; c + kWidth <= end; c += kWidth)
            Transform::forward([&](int64_t i, int64_t j) { return load(at[i][j] + c); }, Positions<A>{to + c, stride});
        }
      if (c < end) transform_staged(from, step_h, step_w, top, bottom, left, right, to, c, end);
    }
  }
  // By way of a copy of the tile.
  [[gnu::noinline]] void transform_staged(const T* from, int64_t step_h, int64_t step_w, int64_t top, int64_t bottom,
                                          int64_t left, int64_t right, A* to, int64_t c, int64_t end) const {
    alignas(64) A tile[kExtentH][kExtentW][kWidth];
    if (bottom - top < kExtentH || right - left < kExtentW) __builtin_memset(tile, 0, sizeof(tile));
    for (; c < end; c += kWidth) {
      const int64_t count = smaller(kWidth, end - c);
      const T* channels = from + c * p.x_stride.c;
      for (int64_t i = top; i < bottom && left < right; i++)
        if (step_w == 1 && p.x_stride.c != 1 && count == kWidth)
          copy_rows(channels + i * step_h + left, 1, p.x_stride.c, right - left, kWidth, tile[i][left], kWidth);
        else
          for (int64_t j = left; j < right; j++)
            store(tile[i][j], load_channels(channels + i * step_h + j * step_w, p.x_stride.c, count));
      // Behind the last channel of the last branch a row has room for the rest of a vector.
      if (count == kWidth || branches == 1)
        forward_vectors<Transform>(tile[0][0], kExtentW * kWidth, kWidth, to + c, stride, 1);
      else if constexpr (!kUnrolled)
        forward_some<Transform>(tile[0][0], kExtentW * kWidth, kWidth, to + c, stride, count);
    }
  }

  // Larger outputs go past the caches, so that no line is read before it is written (docs/decisions/winograd.md).
  bool streams(const void* output) const {
    constexpr int64_t least = int64_t{3} << 19;  // bytes
    return sizeof(T) == sizeof(A) && has_whole_lines<T>(p.y_stride, output) &&
           checked_product({p.batch, p.out_height, p.out_width, p.out_channels, static_cast<int64_t>(sizeof(T))}) >= least;
  }
  // Where a tile's outputs go; plain: neither residual nor activation; edge: a tile of which only some rows and columns lie in
  // the output.
  enum class Finish { general, plain, plain_past_caches };
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
      constexpr bool any = finish == Finish::general;
      if constexpr (any) {
        if (added) v += load(reinterpret_cast<const T*>(reinterpret_cast<intptr_t>(to) + residual));
        v = epilogue(v);
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
  void transform_output(const A* m, const Conv2dOperands& buffers, int64_t t, int64_t slot, int64_t first, int64_t begin,
                        int64_t end, bool streaming) const {
    const int64_t oh = h.first_output(t / w.tiles % h.tiles), ow = w.first_output(t % w.tiles);
    const int64_t rows = h.outputs(oh), columns = w.outputs(ow), step_h = h.phases * p.y_stride.h,
                  step_w = w.phases * p.y_stride.w;
    const int64_t start = t / (w.tiles * h.tiles) * p.y_stride.n + oh * p.y_stride.h + ow * p.y_stride.w;
    [[maybe_unused]] const bool whole = rows == h.tile && columns == w.tile;
    const T* bias = buffers.bias.read<T>();
    const A* slope = buffers.slope.read<A>();
    Epilogue<A> epilogue(p.activation, V(A{0}));
    for (int64_t k = begin; k < end; k += kWidth) {
      const int64_t count = smaller(kWidth, end - k), shift = start + k * p.y_stride.c;
      if (bias) epilogue.bias = load_channels(bias + k, 1, count);
      epilogue.slope = slope ? slope + k : nullptr, epilogue.count = count;
      const T* residual = buffers.residual ? buffers.residual.read<T>() + shift : nullptr;
      T* y = buffers.output.write<T>() + shift;
      const A* const from = m + slot * row + k - first;
      const TileOutput<T> rest{epilogue, y, residual, step_h, step_w, p.y_stride.c, rows, columns};
      const intptr_t apart = reinterpret_cast<intptr_t>(residual) - reinterpret_cast<intptr_t>(y);
      const bool vector = p.y_stride.c == 1 && count == kWidth && !is_called(p.activation);
      if constexpr (kExtentH == 1 && !kUnrolled) {
        if (!vector) {
          V line[kExtentW];
          auto put = [&](int64_t, int64_t j, V v) { line[j] = v; };
          Transform::inverse(Positions<const A>{from, stride}, put, rows, columns);
          finish_tile(rest, line, kExtentW);
          continue;
        }
      }
      if constexpr (!kUnrolled) {
        const Outputs<Finish::general> direct{epilogue, y, step_h, step_w, streaming, residual != nullptr, apart, rows, columns};
        auto put = [&](int64_t i, int64_t j, V v) { vector ? direct(i, j, v) : rest.put_called(i, j, v); };
        Transform::inverse(Positions<const A>{from, stride}, put, rows, columns);
      } else if (std::is_same_v<T, float> && vector) {
        auto finished = [&]<Finish finish, bool edge = false>() {
          const Outputs<finish, edge> to{epilogue, y, step_h, step_w, streaming, residual != nullptr, apart, rows, columns};
          Transform::inverse(Positions<const A>{from, stride}, to, rows, columns);
        };
        if constexpr (std::is_same_v<T, float>) {
          if (!whole)
            finished.template operator()<Finish::general, true>();
          else if (residual || p.activation != Activation::none)
            finished.template operator()<Finish::general>();
          else if (AI3_VECTOR_BYTES == 64 && streaming)
            finished.template operator()<Finish::plain_past_caches>();
          else
            finished.template operator()<Finish::plain>();
        }
      } else {
        V tile[Transform::kOutputsH * Transform::kOutputsW];
        inverse_vector<Transform>(from, stride, tile);
        finish_tile(rest, tile, Transform::kOutputsW);
      }
    }
  }

  void run(const Conv2dOperands& buffers, Workspace& workspace) const {
    static constexpr Phases phases = {
        [](const DomainPlan& d, const void* x, void* v, int64_t t, int64_t slot, int64_t begin, int64_t end) {
          static_cast<const TransformDomain&>(d).transform_input(static_cast<const T*>(x), static_cast<A*>(v), t, slot, begin,
                                                                 end);
        },
        [](const DomainPlan& d, const void* m, const Conv2dOperands& operands, int64_t t, int64_t slot, int64_t first,
           int64_t begin, int64_t end, bool streaming) {
          static_cast<const TransformDomain&>(d).transform_output(static_cast<const A*>(m), operands, t, slot, first, begin, end,
                                                                  streaming);
        }};
    run_domain<A, Stored>(*this, phases, buffers, streams(buffers.output.data), workspace);
  }
};

// body.operator()<A>() for the type of sums of tensors of that type.
template <class Body>
AI3_INLINE void with_sums([[maybe_unused]] DType dtype, const Body& body) {
#ifndef AI3_ONLY_FLOAT32
  if (dtype == DType::f64) return body.template operator()<double>();
#endif
  body.template operator()<float>();
}

// The traits of an algorithm with Transform; StoredAs<A> is the type of its packed weights for the accumulator type A.
template <class A>
using AsComputed = A;
template <class Transform, template <class> class StoredAs = AsComputed>
struct TransformDomainTraits {
  static DomainPlan plan(const Conv2dProblem& p) {
    const bool wide = p.dtype == DType::f64;
    return {p, wide ? sizes_of<Transform>(sizeof(double), sizeof(StoredAs<double>))
                    : sizes_of<Transform>(sizeof(float), sizeof(StoredAs<float>))};
  }
  static int64_t workspace(const Conv2dProblem& p) { return plan(p).workspace(); }
  static int64_t packed_bytes(const Conv2dProblem& p) {
    const DomainPlan d = plan(p);
    return checked_mul(d.packed_elements(), d.sizes.stored_bytes);
  }
  static void pack(const Conv2dProblem& p, const void* weight, void* packed) {
    auto as = [&]<class A>() {
      using Stored = StoredAs<A>;
      pack_domain<A, Stored>(plan(p), weight, static_cast<Stored*>(packed), false, transform_weights<Transform, A, Stored>);
    };
    with_sums(p.dtype, as);
  }
  static Cost cost(const Conv2dProblem& p) { return plan(p).cost(); }
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

}  // namespace ai3::inline AI3_LEVEL

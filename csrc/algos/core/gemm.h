// Packed matrix multiplication, C = A * B, after Goto & van de Geijn (2008) and BLIS (Van Zee & van de Geijn 2015): B lies in
// panels of two vectors' width; a micro-kernel keeps up to kRows rows of one panel's columns in registers and reads A element by
// element. Sums stay in registers over a block of k and in the accumulator's type between blocks: they are never rounded to a
// storage type, and do not depend on blocks or threads.
//
// Panels of B: [ceil(n / kPanel)][k][kPanel], the last one zero-padded. The panels of a weight also serve as A of the transposed
// product, so that one packing serves both layouts of a convolution:
//   NHWC: rows are pixels, columns are output channels; A is the patches, B the packed weight (gemm_rows).
//   NCHW: rows are output channels, columns are pixels; A is the packed weight, B the packed patches (gemm_columns).
#pragma once
#include "algorithm.h"
#include "epilogue.h"
#include "lanes.h"
#include "tiles.h"

namespace ai3::inline AI3_LEVEL {

template <class A>
inline constexpr int kPanel = 2 * Vec<A>::width;
// 2 * kRows accumulators, two vectors of B and one broadcast fill the register file.
inline constexpr int kRows = AI3_VECTOR_BYTES == 64 ? 14 : AI3_VECTOR_BYTES == 32 ? 6 : 4;

template <class A>
AI3_INLINE int64_t panel_count(int64_t columns) {
  return ceil_div(columns, kPanel<A>);
}
// Elements of a packed k x columns matrix.
template <class A>
AI3_INLINE int64_t packed_size(int64_t k, int64_t columns) {
  return checked_product({panel_count<A>(columns), k, kPanel<A>});
}

// Rows that lie a multiple of 4 KiB apart share one set of the L1 cache, which has fewer ways than a slab has rows.
template <class A>
AI3_INLINE bool rows_collide(int64_t stride) {
  return kRows > 8 && stride > 0 && stride * static_cast<int64_t>(sizeof(A)) % 4096 == 0;
}

// ---- Micro-kernel ------------------------------------------------------------------------------------------------------------

// Memory that is needed next: the micro-kernel prefetches `step` bytes of it with each element of k, as far ahead of its use as
// one tile takes. The hardware's prefetchers stop at each page, which a panel fills 32 elements of k later.
struct Next {
  const char* data;
  int64_t step;
};

// bfloat16 pairs: two neighbours in k fill a 32-bit lane, and AVX512-BF16 adds both products to a float32 lane, each sum rounded,
// so that a step of the micro-kernel does two elements of k. Subnormal numbers count as 0 there. Level avx512 does not imply it,
// so it is asked for at run time; everywhere else bfloat16 is widened.
AI3_INLINE bool has_pair_products() { return AI3_VECTOR_BYTES == 64 && uses_bf16_instructions(); }
// Both vectors narrowed: in one instruction where pair products are, which also takes subnormal numbers as 0.
AI3_INLINE void store_rounded(bfloat16* to, Vec<float> left, Vec<float> right) {
#if AI3_VECTOR_BYTES == 64
  Vec<float>::Raw rounded;
  asm("vcvtne2ps2bf16 %2, %1, %0" : "=v"(rounded) : "v"(right.raw), "v"(left.raw));
  __builtin_memcpy(to, &rounded, sizeof(rounded));
#else
  store(to, left), store(to + Vec<float>::width, right);
#endif
}
AI3_INLINE Vec<float> add_pair_products([[maybe_unused]] Vec<float> a, [[maybe_unused]] Vec<float> b, Vec<float> sums) {
#if AI3_VECTOR_BYTES == 64
  asm("vdpbf16ps %2, %1, %0" : "+v"(sums.raw) : "v"(a.raw), "v"(b.raw));
#endif
  return sums;
}

// R rows of a panel's columns, in registers; of a half one, whose right vector is of no use, the left vector alone.
template <class A, int R, bool half = false>
struct MicroTile {
  static_assert(R <= 15);  // Apart's
  using V = Vec<A>;
  V left[R], right[half ? 1 : R];

  AI3_INLINE void start(const A* from, int64_t stride) {
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      left[r] = AI3_LEVEL::load(from + r * stride);
      if constexpr (!half) right[r] = AI3_LEVEL::load(from + r * stride + V::width);
    }
  }
  AI3_INLINE void store(A* c, int64_t ldc) const {
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      AI3_LEVEL::store(c + r * ldc, left[r]);
      if constexpr (!half) AI3_LEVEL::store(c + r * ldc + V::width, right[r]);
    }
  }
  // After a residual, which lies as c does, and the activation.
  AI3_INLINE void store(A* c, int64_t ldc, const A* residual, Activation activation) const {
    with_registers(activation, residual, [&]<Activation constant, bool added>() {
      // Each case by itself: GCC would compute the addresses of all before it knows which one it is, on the stack.
      int64_t apart = ldc;
      asm volatile("" : "+r"(apart));
#pragma GCC unroll 16
      for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int q = 0; q < (half ? 1 : 2); q++) {
          const int64_t at = r * apart + q * V::width;
          V v = q ? right[r] : left[r];
          if constexpr (added) v += AI3_LEVEL::load(residual + at);
          AI3_LEVEL::store(c + at, activate_inline(constant, v));
        }
    });
  }
  AI3_INLINE void store(bfloat16* c, int64_t ldc) const {
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      if constexpr (half)
        AI3_LEVEL::store(c + r * ldc, left[r]);
      else
        store_rounded(c + r * ldc, left[r], right[r]);
    }
  }
  // The panel may be stored in a narrower type.
  template <class Rows, class Stored>
  AI3_INLINE void multiply(Rows rows, const Stored* panel, int64_t k, Next& next) {
    for (int64_t i = 0; i < k; i++, rows.advance(), panel += kPanel<A>, next.data += next.step) {
      const V b0 = AI3_LEVEL::load(panel), b1 = half ? b0 : AI3_LEVEL::load(panel + V::width);
      __builtin_prefetch(next.data);
      if constexpr (sizeof(V) == 64) __builtin_prefetch(next.data + 64);  // a panel's step is two lines
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        const V a = rows.at(r);
        if constexpr (requires { Rows::pairs; }) {
          left[r] = add_pair_products(a, b0, left[r]);
          if constexpr (!half) right[r] = add_pair_products(a, b1, right[r]);
        } else {
          left[r] = fma(a, b0, left[r]);
          if constexpr (!half) right[r] = fma(a, b1, right[r]);
        }
      }
    }
  }
};

// Where A is read; what `multiply` gets has the elements at(row) of one k, from which it advances to the next. Rows with
// contiguous k;
template <class A>
struct StridedRows {
  template <int R>
  struct Elements {
    Apart<const A, R> rows;
    AI3_INLINE A at(int row) const { return *rows[row]; }
    AI3_INLINE void advance() { rows += 1; }
  };
  const A* data;
  int64_t stride;
  AI3_INLINE StridedRows from(int64_t row) const { return {data + row * stride, stride}; }
  template <int R>
  AI3_INLINE Elements<R> elements() const {
    return {{data, stride}};
  }
  AI3_INLINE const char* address() const { return reinterpret_cast<const char*>(data); }
  AI3_INLINE int64_t row_bytes() const { return stride * static_cast<int64_t>(sizeof(A)); }
  AI3_INLINE int64_t slab() const { return rows_collide<A>(stride) ? kRows / 2 : kRows; }
  AI3_INLINE int64_t grain() const { return 1; }  // parts of k begin at multiples of it
  AI3_INLINE StridedRows skip(int64_t steps) const { return {data + steps, stride}; }
  template <int R, bool half, class Stored>
  AI3_INLINE void multiply(MicroTile<A, R, half>& tile, const Stored* panel, int64_t k, Next next) const {
    tile.multiply(elements<R>(), panel, k, next);
  }
};
// rows of bfloat16 pairs with contiguous k, which is counted in pairs;
struct PairRows {
  static constexpr bool pairs = true;
  const bfloat16* data;
  int64_t stride;  // in bfloat16
  AI3_INLINE PairRows from(int64_t row) const { return {data + row * stride, stride}; }
  template <int R>
  struct Pairs {
    static constexpr bool pairs = true;
    Apart<const bfloat16, R> rows;
    AI3_INLINE Vec<float> at(int row) const {
      uint32_t pair;  // as an integer: it is no float that may be quieted
      __builtin_memcpy(&pair, rows[row], sizeof(pair));
      return detail::bit_cast<Vec<float>::Raw>(pair - detail::Words{});
    }
    AI3_INLINE void advance() { rows += 2; }
  };
  AI3_INLINE const char* address() const { return reinterpret_cast<const char*>(data); }
  AI3_INLINE int64_t row_bytes() const { return stride * 2; }
  AI3_INLINE int64_t slab() const { return rows_collide<bfloat16>(stride) ? kRows / 2 : kRows; }
  template <int R, bool half>
  AI3_INLINE void multiply(MicroTile<float, R, half>& tile, const float* panel, int64_t k, Next next) const {
    tile.multiply(Pairs<R>{{data, stride}}, panel, k, next);
  }
};
// columns of one panel, which become rows;
template <class A>
struct PanelRows {
  const A* data;
  AI3_INLINE PanelRows from(int64_t column) const { return {data + column}; }
  AI3_INLINE A at(int row) const { return data[row]; }
  AI3_INLINE void advance() { data += kPanel<A>; }
  template <int R, bool half>
  AI3_INLINE void multiply(MicroTile<A, R, half>& tile, const A* panel, int64_t k, Next next) const {
    tile.multiply(*this, panel, k, next);
  }
};
// or, for k = taps * length, `length` elements at offset behind each of the pointers data[tap * stride + row].
template <class A>
struct IndirectRows {
  const A* const* data;
  int64_t stride, offset, length;
  AI3_INLINE IndirectRows from(int64_t row) const { return {data + row, stride, offset, length}; }
  AI3_INLINE const char* address() const { return reinterpret_cast<const char*>(data); }
  AI3_INLINE int64_t row_bytes() const { return 0; }  // not one after the other
  AI3_INLINE int64_t grain() const { return length; }
  AI3_INLINE IndirectRows skip(int64_t steps) const { return {data + steps / length * stride, stride, offset, length}; }
  template <int R, bool half>
  AI3_INLINE void multiply(MicroTile<A, R, half>& tile, const A* panel, int64_t k, Next next) const {
    struct Tap {
      const A* const* pointers;
      int64_t offset;
      AI3_INLINE A at(int row) const { return pointers[row][offset]; }
      AI3_INLINE void advance() { offset++; }
    };
    const A* const* pointers = data;
    const A* const end = panel + k * kPanel<A>;
    if (length <= 0) __builtin_unreachable();
    do tile.multiply(Tap{pointers, offset}, panel, length, next);
    while (panel += length * kPanel<A>, pointers += stride, panel < end);
  }
};

// Where the sums of a tile start, and what comes after it.
template <class A, class C = A>
struct Tile {
  const A* start;
  int64_t start_stride;  // 0: the same for all rows
  C* c;                  // bfloat16 only for sums of pairs
  int64_t ldc;
  const char* output;  // the tile's lines of the output, which are prefetched before the sums are done
  int64_t output_stride;
  Next next;
  const A* residual = nullptr;  // laid out as c; only of type A, with what is applied in registers
  Activation activation = Activation::none;
};
// C = start + rows * panel; all kPanel columns of c are written, or half of them.
template <class A, int R, bool half, class Rows, class Stored, class C>
AI3_INLINE void micro_kernel(const Rows& rows, const Stored* panel, int64_t k, const Tile<A, C>& t) {
  for (int r = 0; r < R; r++) {
    const char* line = t.output + r * t.output_stride;
    __builtin_prefetch(line, 1);
    if constexpr (!half) __builtin_prefetch(line + 64, 1);
  }
  MicroTile<A, R, half> tile;
  tile.start(t.start, t.start_stride);
  // Not a loop of no turns: where its two ways met, GCC would keep the whole tile in memory before and after it.
  if (k <= 0) return tile.store(t.c, t.ldc);
  rows.multiply(tile, panel, k, t.next);
  if constexpr (requires { tile.store(t.c, t.ldc, t.residual, t.activation); })
    tile.store(t.c, t.ldc, t.residual, t.activation);
  else
    tile.store(t.c, t.ldc);
}
template <class A, int R, bool half, class Rows, class Stored, class C>
[[gnu::noinline]] void called_micro_kernel(Rows rows, const Stored* panel, int64_t k, const Tile<A, C>& t) {
  micro_kernel<A, R, half>(rows, panel, k, t);
}
// Inlined, where products are so short that a call counts: for k = 64 it takes 5% of their time.
template <class A, bool inlined = false, bool half = false, int R = kRows, class Rows, class Stored, class C>
AI3_INLINE void multiply_tile(int64_t row_count, const Rows& rows, const Stored* panel, int64_t k, const Tile<A, C>& tile) {
  if constexpr (R > 1)
    if (row_count < R) return multiply_tile<A, inlined, half, R - 1>(row_count, rows, panel, k, tile);
  if constexpr (inlined)
    micro_kernel<A, R, half>(rows, panel, k, tile);
  else
    called_micro_kernel<A, R, half>(rows, panel, k, tile);
}

// ---- Output ------------------------------------------------------------------------------------------------------------------

// Where a product goes: activation(product + bias + residual), narrowed to T. One of the two strides is 1.
template <class T>
struct Output {
  T* data;
  int64_t row_stride, column_stride = 1;
  const T* bias = nullptr;
  bool bias_per_row = false;
  const T* residual = nullptr;  // laid out as data, or data itself
  Activation activation = Activation::none;
  const Acc<T>* slope = nullptr;  // per row or column, as the bias
  bool add = false;               // onto what is there; only where T is the accumulator type

  AI3_INLINE void set_epilogue(Activation a, const Buffers& m) {
    bias = static_cast<const T*>(m.bias), residual = static_cast<const T*>(m.residual);
    activation = a, slope = static_cast<const Acc<T>*>(m.slope);
  }
  AI3_INLINE bool plain() const { return !bias && !residual && activation == Activation::none && column_stride == 1; }
  // The output of one block of k: the first one starts from bias and residual, the last one applies the activation.
  AI3_INLINE Output part(bool first, bool last) const {
    Output o = *this;
    if (!first) o.bias = o.residual = nullptr, o.add = true;
    if (!last) o.activation = Activation::none;
    return o;
  }
  AI3_INLINE Output from(int64_t row, int64_t column) const {
    Output o = *this;
    const int64_t shift = row * row_stride + column * column_stride;
    o.data += shift;
    if (residual) o.residual += shift;
    if (bias) o.bias += bias_per_row ? row : column;
    if (slope) o.slope += bias_per_row ? row : column;
    return o;
  }
};

// The epilogue on the first `count` lanes of `sums`, which go to out.data + shift, from channel `channel` of bias and slope on;
// these are vectors too, or one value.
template <bool called, class T>
AI3_INLINE void store_vector(const Output<T>& out, int64_t shift, Vec<Acc<T>> sums, int64_t channel, bool one_bias,
                             int64_t count) {
  constexpr int width = Vec<Acc<T>>::width;
  const T *bias = out.bias ? out.bias + channel : nullptr, *residual = out.residual ? out.residual + shift : nullptr;
  if (bias && one_bias) sums += Vec<Acc<T>>(widen(*bias));
  if (count >= width) {
    if (bias && !one_bias) sums += load(bias);
    if (residual) sums += load(residual);
    auto slopes = [&] { return one_bias ? Vec<Acc<T>>(out.slope[channel]) : load(out.slope + channel); };
    store(out.data + shift, activate_stored<called>(out.activation, sums, slopes));
  } else {
    if (bias && !one_bias) sums += load_partial(bias, count);
    if (residual) sums += load_partial(residual, count);
    auto slopes = [&] { return one_bias ? Vec<Acc<T>>(out.slope[channel]) : load_partial(out.slope + channel, count); };
    store_partial(out.data + shift, activate_stored<called>(out.activation, sums, slopes), count);
  }
}
// Stores rows x columns sums with the epilogue. Rows of `sums` can be read in whole vectors. Where columns of the output are
// contiguous, squares of sums turn in registers.
template <bool called, class T>
void store_block_as(const Output<T>& out, const Acc<T>* sums, int64_t lds, int64_t rows, int64_t columns) {
  constexpr int width = Vec<Acc<T>>::width;
  auto channel_of = [&](int64_t row, int64_t column) { return out.bias_per_row ? row : column; };
  if (out.column_stride == 1) {
    for (int64_t r = 0; r < rows; r++)
      for (int64_t c = 0; c < columns; c += width)
        store_vector<called>(out, r * out.row_stride + c, load(sums + r * lds + c), channel_of(r, c), out.bias_per_row,
                             columns - c);
    return;
  }
  for (int64_t r0 = 0; r0 < rows; r0 += width)
    for (int64_t c0 = 0; c0 < columns; c0 += width) {
      Vec<Acc<T>> square[width];
#pragma GCC unroll 16
      for (int r = 0; r < width; r++) square[r] = r < rows - r0 ? load(sums + (r0 + r) * lds + c0) : Vec<Acc<T>>(Acc<T>{0});
      transpose(square);
#pragma GCC unroll 16
      for (int c = 0; c < width; c++)
        if (c < columns - c0)
          store_vector<called>(out, r0 * out.row_stride + (c0 + c) * out.column_stride, square[c], channel_of(r0, c0 + c),
                               !out.bias_per_row, rows - r0);
    }
}
template <class T>
void store_block(const Output<T>& out, const Acc<T>* sums, int64_t lds, int64_t rows, int64_t columns) {
  is_called(out.activation) ? store_block_as<true>(out, sums, lds, rows, columns)
                            : store_block_as<false>(out, sums, lds, rows, columns);
}

// ---- One thread --------------------------------------------------------------------------------------------------------------

// A slab of at most kRows rows times one panel, of which `columns` are used. Sums start from what is there (earlier sums, or a
// residual that lies where the output does) or from the bias; the rest of the epilogue follows while the tile is in the L1 cache.
template <class T, class Rows, class Stored>
AI3_INLINE void multiply_slab(const Rows& rows, int64_t row_count, const Stored* panel, int64_t columns, int64_t k,
                              const Output<T>& out, Next next) {
  using A = Acc<T>;
  constexpr int P = kPanel<A>;
  constexpr bool same = sizeof(T) == sizeof(A);
  const bool onto_residual = same && out.residual == out.data, add = out.add || onto_residual;
  const bool half = columns <= Vec<A>::width;
  const bool whole = (half ? columns == Vec<A>::width : columns == P) && out.column_stride == 1,
             biased = out.bias && !out.bias_per_row && !add;
  alignas(64) A start[P] = {};
  Output<T> rest = out;
  if (biased) rest.bias = nullptr;
  if (onto_residual) rest.residual = nullptr;
  auto tile = [&]<class C>(const A* from, int64_t stride, C* c, int64_t ldc, const A* residual = nullptr,
                           Activation activation = Activation::none) {
    const Tile<A, C> t{
        from, stride,   c,         ldc, reinterpret_cast<const char*>(out.data), out.row_stride * static_cast<int64_t>(sizeof(T)),
        next, residual, activation};
    if (half)
      multiply_tile<A, false, true>(row_count, rows, panel, k, t);
    else
      multiply_tile<A>(row_count, rows, panel, k, t);
  };
  if constexpr (same)
    if (whole) {
      const A* const from = add ? out.data : biased ? out.bias : start;
      if (k > 0 && !rest.bias && is_applied_in_registers(rest.activation, rest.residual))
        return tile(from, add ? out.row_stride : 0, out.data, out.row_stride, rest.residual, rest.activation);
      tile(from, add ? out.row_stride : 0, out.data, out.row_stride);
      if (!rest.plain()) store_block(rest, out.data, out.row_stride, row_count, columns);
      return;
    }
  if (biased)
    for (int64_t i = 0; i < columns; i++) start[i] = widen(out.bias[i]);
  if constexpr (requires { Rows::pairs; } && !same)
    if (whole && rest.plain()) return tile(start, 0, out.data, out.row_stride);
  alignas(64) A sums[kRows * P];
  tile(start, 0, sums, P);
  if constexpr (same)
    if (add)
      for (int64_t r = 0; r < row_count; r++)
        for (int64_t i = 0; i < columns; i++) sums[r * P + i] += out.data[r * out.row_stride + i * out.column_stride];
  store_block(rest, sums, P, row_count, columns);
}

// out[rows][columns] (=, +=) A * B; A as StridedRows or IndirectRows. The operand in the inner loop stays in the L2 cache, the
// other one passes once: the next slab is prefetched evenly over the panels of the slab before it, and the next panel over the
// slabs of the panel before it. For that two panels have to stay in the cache with the rows: longer ones are multiplied a part of
// k at a time, whose sums wait in the output (docs/decisions/gemm.md); where it cannot hold them, a panel is prefetched a little
// ahead. Parts depend on k and the types alone, so that threads' shares do not change the order of sums. Panels lie panel_stride
// apart: k * kPanel where B is the whole of the packed matrix, more where it is a part of k.
template <class T, class Rows, class Stored>
void gemm_block(const Rows& a, int64_t rows, const Stored* panels, int64_t panel_stride, int64_t columns, int64_t k,
                const Output<T>& out) {
  constexpr int64_t P = kPanel<Acc<T>>, kStep = P * static_cast<int64_t>(sizeof(Stored)), kPanelsBytes = 256 << 10,
                    kMostSteps = kPanelsBytes / 2 / kStep, kSpread = 16, kNear = 8192;
  constexpr bool divisible = sizeof(T) == sizeof(Acc<T>) && requires { a.skip(k); };  // T holds sums, rows can begin inside k
  if (rows <= 0 || columns <= 0) return;
  int64_t slab = kRows;  // rows
  if constexpr (requires { a.slab(); }) slab = a.slab();
  const int64_t slabs = ceil_div(rows, slab), panel_total = ceil_div(columns, P);
  int64_t grain = 1, parts = 1;
  if constexpr (divisible)
    if (k > kMostSteps && a.grain() <= kMostSteps && out.column_stride == 1)
      grain = a.grain(), parts = ceil_div(k / grain, kMostSteps / grain);
  auto part_of_k = [&](int64_t i) {
    if (parts == 1) return Share{0, k};  // without the divisions, which a short product would notice
    const Share units = share(k / grain, parts, i);
    return Share{units.begin * grain, units.end * grain};
  };
  auto tile = [&](int64_t s, int64_t q, int64_t i, const Share& part, Next next) {
    const Share r = share(rows, slabs, s);
    Rows from = a.from(r.begin);
    if constexpr (divisible)
      if (i > 0) from = from.skip(part.begin);
    multiply_slab<T>(from, r.end - r.begin, panels + q * panel_stride + part.begin * P, columns - q * P < P ? columns - q * P : P,
                     part.end - part.begin, out.from(r.begin, q * P).part(i == 0, i == parts - 1), next);
  };
  if (columns < rows && columns * k * static_cast<int64_t>(sizeof(Stored)) <= kPanelsBytes) {
    const int64_t slab_bytes = slab * a.row_bytes(), step = slab_bytes / (panel_total * larger(1, k));
    for (int64_t s = 0; s < slabs; s++) {
      const char* next_slab = a.address() + slab_bytes * (s + 1 < slabs ? s + 1 : s);
      for (int64_t q = 0; q < panel_total; q++)
        for (int64_t i = 0; i < parts; i++) {
          const Share part = part_of_k(i);
          tile(s, q, i, part, {next_slab + (q * k + part.begin) * step, step});
        }
    }
    return;
  }
  for (int64_t q = 0; q < panel_total; q++)
    for (int64_t i = 0; i < parts; i++) {
      const bool last = i == parts - 1;
      const Share part = part_of_k(i), following = part_of_k(last ? 0 : i + 1);
      const int64_t length = part.end - part.begin;
      const bool near = slabs == 1 || length > kMostSteps;
      const Stored *panel = panels + q * panel_stride, *next_panel = last && q + 1 < panel_total ? panel + panel_stride : panel;
      const char *here = reinterpret_cast<const char*>(panel + part.begin * P),
                 *next = near ? here + kNear : reinterpret_cast<const char*>(next_panel + following.begin * P);
      const int64_t spread = near ? 1 : smaller(slabs, kSpread),
                    step = near ? kStep : ceil_div(kStep * (following.end - following.begin), larger(1, spread * length));
      for (int64_t s = 0; s < slabs; s++) tile(s, q, i, part, s < spread ? Next{next + s * step * length, step} : Next{here, 0});
    }
}

// Stores the sums of a slab, which the bias is in already where it is one of columns.
template <class T>
AI3_INLINE void store_sums(Output<T> out, float* sums, int64_t rows, int64_t columns, bool biased) {
  constexpr int64_t P = kPanel<float>;
  if (biased) out.bias = nullptr;
  if constexpr (sizeof(T) == sizeof(float)) {
    if (out.add)
      for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c++) sums[r * P + c] += out.data[r * out.row_stride + c * out.column_stride];
  } else if (columns == P && out.plain()) {
    for (int64_t r = 0; r < rows; r++)
      store_rounded(out.data + r * out.row_stride, load(sums + r * P), load(sums + r * P + P / 2));
    return;
  }
  store_block(out, sums, P, rows, columns);
}
// Rows of pairs, in tiles. A part of k at a time, so that a slab's rows and a panel of it stay in the L1 cache: the latency of
// tile loads is not hidden, and from the L2 cache both operands take half as long again. Between parts the sums of a group of
// slabs, whose rows stay in the L2 cache, lie in a buffer, where the epilogue takes them (docs/decisions/tiles.md).
template <class T>
void multiply_in_tiles(const PairRows& a, int64_t rows, const float* panels, int64_t panel_stride, int64_t columns, int64_t k,
                       const Output<T>& out) {
  constexpr int64_t P = kPanel<Acc<T>>, kPart = 8, kGroup = 10, kGroupBytes = 960 << 10;  // steps of a part, slabs of a group
  static_assert(P == kSlabColumns);
  alignas(64) float sums[kGroup * kSlabRows * P];
  const TileSteps steps(k);
  const int64_t whole_parts = ceil_div(steps.count, kPart), parts = whole_parts + (steps.rest > 0),
                panel_total = ceil_div(columns, P), height = ceil_div(rows, ceil_div(rows, kSlabRows)),
                apart = parts > 1 ? height * P : 0,
                group = height * larger(1, smaller(kGroup, kGroupBytes / (kSlabRows * k * 4)));
  const bool biased = out.bias && !out.bias_per_row;
  int64_t configured_rows = 0, configured_pairs = 0;
  auto multiply_panel = [&](int64_t first, int64_t last, int64_t q) {
    const int64_t used = smaller(P, columns - q * P), slabs = ceil_div(last - first, height),
                  next_panel = q + 1 < panel_total ? q + 1 : 0;
    alignas(64) float bias[P] = {};
    if (biased)
      for (int64_t c = 0; c < used; c++) bias[c] = widen(out.bias[q * P + c]);
    for (int64_t i = 0; i < parts; i++) {
      const bool is_rest = i == whole_parts, is_last = i == parts - 1;
      const Share part = is_rest ? Share{0, 1} : share(steps.count, whole_parts, i);
      const int64_t step = is_rest ? steps.rest : steps.step, from = is_rest ? k - steps.rest : part.begin * step;
      // The same part of the next panel, a share of it for each slab.
      const char* next = reinterpret_cast<const char*>(panels + next_panel * panel_stride + from * P);
      const int64_t ahead = round_up(ceil_div(step * P * 4, slabs), 64);
      float* own = sums;
      for (int64_t row = first; row < last; row += height, own += apart, next += ahead * part.size()) {
        const int64_t count = smaller(height, last - row);
        if (count != configured_rows || step != configured_pairs) {
          configured_rows = count, configured_pairs = step;
          amx::configure(amx::Shapes(count, step));
        }
        multiply_tiles(count, used, a.from(row).address() + from * 4, a.row_bytes(), panels + q * panel_stride + from * P,
                       part.size(), step, i == 0 ? bias : own, i == 0 ? 0 : P, own, next, ahead);
        if (!is_last) continue;
        // The lines of the next panel's outputs come into the L2 cache: rows lie on pages of their own, where no prefetcher of
        // the hardware has them ready.
        for (int64_t r = 0; r < count; r++)
          __builtin_prefetch(out.data + (row + r) * out.row_stride + next_panel * P * out.column_stride, 1, 2);
        store_sums(out.from(row, q * P), own, count, used, biased);
      }
    }
  };
  for (int64_t first = 0; first < rows; first += group)
    for (int64_t q = 0; q < panel_total; q++) multiply_panel(first, smaller(rows, first + group), q);
  amx::release();
}
template <class T>
void gemm_block(const PairRows& a, int64_t rows, const float* panels, int64_t panel_stride, int64_t columns, int64_t k,
                const Output<T>& out) {
  if constexpr (AI3_VECTOR_BYTES == 64)
    if (fills_tiles(rows, k)) return multiply_in_tiles<T>(a, rows, panels, panel_stride, columns, k, out);
  gemm_block<T, PairRows, float>(a, rows, panels, panel_stride, columns, k, out);
}
template <class T, class Rows>
AI3_INLINE void gemm_block(const Rows& a, int64_t rows, const Acc<T>* panels, int64_t columns, int64_t k, const Output<T>& out) {
  gemm_block<T>(a, rows, panels, k * kPanel<Acc<T>>, columns, k, out);
}
// The same with the columns of packed panels `a` as rows.
template <class T>
void gemm_block(const PanelRows<Acc<T>>& a, int64_t rows, const Acc<T>* panels, int64_t columns, int64_t k,
                const Output<T>& out) {
  constexpr int64_t P = kPanel<Acc<T>>;
  for (int64_t p = 0; p < rows; p += P) {
    const int64_t n = rows - p < P ? rows - p : P, slabs = ceil_div(n, kRows);
    for (int64_t s = 0; s < slabs; s++) {
      const Share r = share(n, slabs, s);
      for (int64_t c = 0; c < columns; c += P)
        multiply_slab<T>(PanelRows<Acc<T>>{a.data + p * k}.from(r.begin), r.end - r.begin, panels + c * k,
                         columns - c < P ? columns - c : P, k, out.from(p + r.begin, c),
                         {reinterpret_cast<const char*>(panels + c * k), 0});
    }
  }
}
// c[rows][columns] (=, +=) a[rows][k] * B, for use inside other kernels.
template <class A>
AI3_INLINE void gemm_block(const A* a, int64_t lda, int64_t rows, const A* panels, int64_t columns, int64_t k, A* c, int64_t ldc,
                           bool add) {
  Output<A> out{c, ldc};
  out.add = add;
  gemm_block<A>(StridedRows<A>{a, lda}, rows, panels, columns, k, out);
}

// Packs b[k][columns], whose elements lie at k_stride and column_stride, into panels `panel_stride` elements apart (k * kPanel
// where the matrix is packed whole, more where it is a part of one that is longer in k).
template <class T, class Stored>
void pack_panels(const T* b, int64_t k, int64_t columns, int64_t k_stride, int64_t column_stride, Stored* panels,
                 int64_t panel_stride) {
  constexpr int P = kPanel<Acc<T>>;
  for (int64_t c = 0; c < columns; c += P, panels += panel_stride) {
    const int64_t n = columns - c < P ? columns - c : P;
    const T* from = b + c * column_stride;
    int64_t i = 0;
    if (k_stride == 1 && n == P)  // squares turn in registers
      for (constexpr int width = P / 2; i + width <= k; i += width)
        for (int half = 0; half < 2; half++) {
          Vec<Acc<T>> square[width];
#pragma GCC unroll 16
          for (int j = 0; j < width; j++) square[j] = load(from + (half * width + j) * column_stride + i);
          transpose(square);
#pragma GCC unroll 16
          for (int j = 0; j < width; j++) store(panels + (i + j) * P + half * width, square[j]);
        }
    for (; i < k; i++) {
      Stored* to = panels + i * P;
      for (int64_t j = 0; j < n; j++) to[j] = narrowed<Stored>(widen(from[i * k_stride + j * column_stride]));
      for (int64_t j = n; j < P; j++) to[j] = {};
    }
  }
}

// Packs the columns of b, `column_stride` apart and contiguous in k, as pairs of bfloat16 along k, an odd last one with 0: panels
// of ceil(k / 2) steps, which PairRows multiply.
template <class T>
void pack_pair_panels(const T* b, int64_t k, int64_t columns, int64_t column_stride, float* panels, int64_t panel_stride) {
  constexpr int width = Vec<float>::width, P = kPanel<float>;
  for (int64_t c = 0; c < columns; c += width, panels += c % P ? width : panel_stride - width)
    for (int64_t i = 0; i < k; i += 2 * width) {
      Vec<float> square[width];
      for (int j = 0; j < width; j++) {
        bfloat16 pairs[2 * width] = {};
        const T* from = b + (c + j) * column_stride + i;
        if (c + j < columns)
          for (int64_t e = 0; e < smaller(2 * width, k - i); e++) narrow(widen(from[e]), pairs[e]);
        __builtin_memcpy(&square[j], pairs, sizeof(pairs));
      }
      transpose(square);
      for (int64_t j = 0; j < smaller(width, ceil_div(k - i, 2)); j++) store(panels + (i / 2 + j) * P, square[j]);
    }
  if (const int64_t rest = columns % P; rest > 0 && rest <= width)  // the second half of the last panel
    for (int64_t i = 0; i < ceil_div(k, 2); i++) store(panels + i * P, Vec<float>(0.f));
}

// ---- Threads -----------------------------------------------------------------------------------------------------------------

// How products are cut into tasks: each task prepares (copies, gathers) one of `prepared` shares of its operand's units, slabs of
// kRows rows or panels, and multiplies it with one of `streamed` shares of the packed weight's panels.
struct Grid {
  int64_t prepared, streamed;
  bool even = false;  // one task for each of more than two threads: rows may be shared evenly, in slabs of less than kRows rows
};
// The grid of the least modelled time, in cycles: both sides are cut, so that small products use all threads too. A task reads
// its part of both operands once; its prepared one, `block_k` elements of k at a time, stays in the L2 cache. `preparation` is
// cycles per element besides.
template <class A>
Grid gemm_grid(int threads, int64_t products, int64_t units, int64_t unit_size, int64_t panels, int64_t k, double preparation,
               int64_t block_k = kOverflow) {
  constexpr int64_t kBlockBytes = 512 << 10;
  constexpr double kStreamedPerCycle = 16. / sizeof(A), kTask = 1000;
  const int64_t unit = unit_size * (k < block_k ? k : block_k) * static_cast<int64_t>(sizeof(A)),
                most = unit > 0 && unit < kBlockBytes ? kBlockBytes / unit : 1;
  Grid best{};
  double least = 0;
  for (int64_t prepared = ceil_div(units, most); prepared > 0;
       prepared = prepared == units ? 0 : smaller(units, prepared % threads ? round_up(prepared, threads) : prepared * 2))
    for (int64_t streamed = 1; streamed > 0; streamed = streamed == panels ? 0 : streamed * 2 < panels ? streamed * 2 : panels) {
      const double rows = static_cast<double>(ceil_div(units, prepared) * unit_size * k),
                   columns = static_cast<double>(ceil_div(panels, streamed) * kPanel<A>);
      const double read = (rows + columns * static_cast<double>(k)) / kStreamedPerCycle;
      const double task = kTask + rows * (columns / Vec<A>::width + preparation) + read;
      const double time = task * static_cast<double>(ceil_div(products * prepared * streamed, threads));
      if (best.prepared && time >= least) continue;
      best = {prepared, streamed}, least = time;
    }
  best.even = threads > 2 && best.prepared > 0 && panels > 0 && products * best.prepared * best.streamed <= threads;
  if (best.even) best.streamed = ceil_div(panels, ceil_div(panels, best.streamed));  // as few as are done at the same time
  return best;
}
// The same for rows of pairs. In tiles their groups stay in the L2 cache whatever a task has, and where there are many, each
// thread takes a share of the rows: what comes next shares them alike.
inline Grid pair_grid(int threads, int64_t products, int64_t rows, int64_t columns, int64_t k, double preparation) {
  constexpr int64_t kManyRows = 256;  // of a thread
  const bool tiles = fills_tiles(rows, k);
  if (tiles && products == 1 && rows >= kManyRows * threads) return {threads, 1, threads > 2};
  return gemm_grid<float>(threads, products, ceil_div(rows, kRows), kRows, panel_count<float>(columns), k, preparation,
                          tiles ? 1 : k);
}
// body(product, prepared share, streamed share, thread) for every task. Neighbours in time use the same part of the weight.
// size(prepared share, streamed share) as in parallel_for.
struct TasksAlike {
  AI3_INLINE double operator()(int64_t, int64_t) const { return 1; }
};
template <class Body, class Size = TasksAlike>
AI3_INLINE void for_grid(int threads, int64_t products, const Grid& grid, const Body& body, const Size& size = {}) {
  parallel_for(
      threads, products * grid.prepared * grid.streamed,
      [&](int64_t i, int thread) {
        const int64_t rest = i / grid.prepared;
        body(rest / grid.streamed, i % grid.prepared, rest % grid.streamed, thread);
      },
      [&](int64_t i) { return size(i % grid.prepared, i / grid.prepared % grid.streamed); });
}
// Share i of `rows` rows, in whole slabs of about equal height.
AI3_INLINE Share row_share(int64_t rows, int64_t shares, int64_t i) {
  const int64_t slabs = ceil_div(rows, kRows);
  const Share s = share(slabs, shares, i);
  return {rows * s.begin / slabs, rows * s.end / slabs};
}
AI3_INLINE Share row_share(int64_t rows, const Grid& grid, int64_t i) {
  return grid.even ? share(rows, grid.prepared, i) : row_share(rows, grid.prepared, i);
}
// Share i of `columns` columns, in whole panels.
template <class A>
AI3_INLINE Share column_share(int64_t columns, int64_t shares, int64_t i) {
  const Share s = share(panel_count<A>(columns), shares, i);
  return {s.begin * kPanel<A>, s.end * kPanel<A> < columns ? s.end * kPanel<A> : columns};
}
// The size of a task that multiplies these shares of rows and columns.
template <class A>
AI3_INLINE auto product_size(int64_t rows, int64_t columns, int64_t k, const Grid& grid) {
  return [=](int64_t i, int64_t j) {
    const Share r = row_share(rows, grid, i), c = column_share<A>(columns, grid.streamed, j);
    return 2. * static_cast<double>((r.end - r.begin) * panel_count<A>(c.end - c.begin) * k);
  };
}

// The stride of prepared rows.
template <class A>
AI3_INLINE int64_t prepared_stride(int64_t k) {
  return rows_collide<A>(k) ? k + 16 : k;
}

template <class T>
AI3_INLINE void copy_widened(const T* from, int64_t count, Acc<T>* to) {
  using V = Vec<Acc<T>>;
  int64_t i = 0;
  for (; i + V::width <= count; i += V::width) store(to + i, load(from + i));
  if (i < count) store_partial(to + i, load_partial(from + i, count - i), count - i);
}

}  // namespace ai3::inline AI3_LEVEL

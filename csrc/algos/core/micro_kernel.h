// The micro-kernel of packed products (gemm.h), after BLIS (Van Zee & van de Geijn 2015): the sums of up to kRows rows and one
// panel's columns stay in registers, and A is read element by element, from rows that lie in one of several ways.
#pragma once
#include "algorithm.h"
#include "epilogue.h"
#include "lanes.h"

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
// The stride of prepared rows.
template <class A>
AI3_INLINE int64_t prepared_stride(int64_t k) {
  return rows_collide<A>(k) ? k + 16 : k;
}

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
// Both vectors narrowed, each lane of the first one beside the second one's.
AI3_INLINE Vec<float> pairs_of(Vec<float> first, Vec<float> second) {
#if AI3_VECTOR_BYTES == 64
  typedef uint16_t Lanes __attribute__((vector_size(64)));
  Lanes rounded;
  asm("vcvtne2ps2bf16 %2, %1, %0" : "=v"(rounded) : "v"(second.raw), "v"(first.raw));
  return detail::bit_cast<Vec<float>::Raw>(__builtin_shufflevector(rounded, rounded, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6,
                                                                   22, 7, 23, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14,
                                                                   30, 15, 31));
#else
  using detail::bit_cast, detail::round_to_bfloat16, detail::Words;
  return bit_cast<Vec<float>::Raw>(round_to_bfloat16(bit_cast<Words>(first.raw)) | round_to_bfloat16(bit_cast<Words>(second.raw))
                                                                                       << 16);
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

  AI3_INLINE void clear() {
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) left[r] = right[half ? 0 : r] = V(A(0));
  }
  // To every row, or to each its own.
  AI3_INLINE void add(const A* from, int64_t stride = 0) {
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      left[r] += AI3_LEVEL::load(from + r * stride);
      if constexpr (!half) right[r] += AI3_LEVEL::load(from + r * stride + V::width);
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

// What comes after the sums of a tile. A bias is added last: each of k additions onto it would round at its size.
template <class A, class C = A>
struct Tile {
  const A* bias;  // of every row
  C* c;           // bfloat16 only for sums of pairs
  int64_t ldc;
  const char* output;  // the tile's lines of the output, which are prefetched before the sums are done
  int64_t output_stride;
  Next next;
  const A* residual = nullptr;  // laid out as c; only of type A, with what is applied in registers
  Activation activation = Activation::none;
};
// C = rows * panel + bias + residual, which with k = 0 counts as nothing; all kPanel columns of c are written, or half of them.
template <class A, int R, bool half, class Rows, class Stored, class C>
AI3_INLINE void micro_kernel(const Rows& rows, const Stored* panel, int64_t k, const Tile<A, C>& t) {
  for (int r = 0; r < R; r++) {
    const char* line = t.output + r * t.output_stride;
    __builtin_prefetch(line, 1);
    if constexpr (!half) __builtin_prefetch(line + 64, 1);
  }
  MicroTile<A, R, half> tile;
  tile.clear();
  // Not a loop of no turns: where its two ways met, GCC would keep the whole tile in memory before and after it.
  if (k <= 0) return tile.add(t.bias), tile.store(t.c, t.ldc);
  rows.multiply(tile, panel, k, t.next);
  tile.add(t.bias);
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

}  // namespace ai3::inline AI3_LEVEL

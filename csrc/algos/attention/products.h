// Products of rows, for kernels of attention that compute tiles of scores (tiles.h). Each is long unrolled code and depends on
// the accumulator's type alone, so it is compiled once for each level, in products.cpp.
#pragma once
#include "../core/instances.h"

namespace ai3::inline AI3_LEVEL {

template <class A>
AI3_INLINE int64_t padded(int64_t elements) {
  return round_up(elements, Vec<A>::width);
}
template <class T>
struct RowsAt {
  const T* data;
  int64_t stride;
};
// x * 0 is 0 unless x is not finite. Four sums, so that additions need not wait for each other.
template <class T>
[[gnu::noinline]] bool all_finite(const RowsAt<T>& rows, int64_t count, int64_t size) {
  using A = Acc<T>;
  constexpr int64_t width = Vec<A>::width;
  typename Vec<A>::Raw sums[4] = {};
  A rest = 0;
  for (int64_t r = 0; r < count; r++) {
    const T* row = rows.data + r * rows.stride;
    int64_t c = 0;
    for (; c + 4 * width <= size; c += 4 * width)
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) sums[i] += load(row + c + i * width).raw * typename Vec<A>::Raw{};
    for (; c + width <= size; c += width) sums[0] += load(row + c).raw * typename Vec<A>::Raw{};
    for (; c < size; c++) rest += widen(row[c]) * A(0);
  }
  const auto sum = sums[0] + sums[1] + (sums[2] + sums[3]);
  for (int l = 0; l < width; l++) rest += sum[l];
  return rest == 0;
}

// to[row][column of the panel] = rows * panel, or of its left half alone.
template <class A, bool half = false>
[[gnu::noinline]] void multiply_rows(const RowsAt<A>& rows, int64_t count, const A* panel, int64_t size, A* to) {
  constexpr int64_t P = kPanel<A>;
  alignas(64) const A zeros[P] = {};
  for (int64_t r = 0; r < count; r += kRows) {
    const int64_t n = smaller(kRows, count - r);
    const char* const next = reinterpret_cast<const char*>(rows.data + smaller(r + kRows, count - 1) * rows.stride);
    multiply_tile<A, true, half>(n, StridedRows<A>{rows.data + r * rows.stride, rows.stride}, panel, size,
                                 Tile<A>{zeros, to + r * P, P, next, 0, {next, kRows * static_cast<int64_t>(sizeof(A))}});
  }
}
// sums[query] += weights(query, key) * rows[key], for R queries and two vectors of columns, or one; weights lie [key][query of a
// panel], `queries_in_lanes`, or [query][key of a panel]. Products are summed apart first, so that few are rounded at the size of
// the whole.
template <class A, bool queries_in_lanes, bool half, int R = kRows>
AI3_INLINE void add_weighted_tile(int64_t queries, const A* weights, const RowsAt<A>& rows, int64_t keys, A* sums, int64_t ld) {
  if constexpr (R > 1)
    if (queries < R) return add_weighted_tile<A, queries_in_lanes, half, R - 1>(queries, weights, rows, keys, sums, ld);
  constexpr int64_t of_query = queries_in_lanes ? 1 : kPanel<A>, of_key = queries_in_lanes ? kPanel<A> : 1;
  MicroTile<A, R, half> tile;
  tile.clear();
  const A* row = rows.data;
  for (int64_t j = 0; j < keys; j++, weights += of_key, row += rows.stride) {
    const Vec<A> left = load(row), right = half ? left : load(row + Vec<A>::width);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      const Vec<A> w = weights[r * of_query];
      tile.left[r] = fma(w, left, tile.left[r]);
      if constexpr (!half) tile.right[r] = fma(w, right, tile.right[r]);
    }
  }
  tile.add(sums, ld);
  tile.store(sums, ld);
}
template <class A, bool queries_in_lanes = true>
[[gnu::noinline]] void add_weighted(int64_t queries, const A* weights, const RowsAt<A>& rows, int64_t keys, int64_t columns,
                                    A* sums) {
  constexpr int64_t P = kPanel<A>, width = Vec<A>::width;
  const int64_t ld = padded<A>(columns), slabs = ceil_div(queries, kRows);
  for (int64_t c = 0; c < columns; c += P)
    for (int64_t s = 0; s < slabs; s++) {
      const Share q = share(queries, slabs, s);
      const RowsAt<A> from{rows.data + c, rows.stride};
      const A* const of_slab = weights + q.begin * (queries_in_lanes ? 1 : P);
      if (columns - c <= width)
        add_weighted_tile<A, queries_in_lanes, true>(q.size(), of_slab, from, keys, sums + q.begin * ld + c, ld);
      else
        add_weighted_tile<A, queries_in_lanes, false>(q.size(), of_slab, from, keys, sums + q.begin * ld + c, ld);
    }
}

extern template bool all_finite<bfloat16>(const RowsAt<bfloat16>&, int64_t, int64_t);
// to[row][column of the panel] (=, +=) rows * panel, of pairs of bfloat16, half of its columns or all: where has_pair_products().
[[gnu::noinline]] void multiply_pair_rows(const bfloat16* rows, int64_t stride, int64_t count, const float* panel,
                                          int64_t columns, int64_t pairs, float* to, bool add);

#define AI3_ATTENTION_PRODUCTS_OF_(EXTERN, A)                                                            \
  EXTERN template bool all_finite<A>(const RowsAt<A>&, int64_t, int64_t);                                \
  EXTERN template void multiply_rows<A>(const RowsAt<A>&, int64_t, const A*, int64_t, A*);               \
  EXTERN template void multiply_rows<A, true>(const RowsAt<A>&, int64_t, const A*, int64_t, A*);         \
  EXTERN template void add_weighted<A, true>(int64_t, const A*, const RowsAt<A>&, int64_t, int64_t, A*); \
  EXTERN template void add_weighted<A, false>(int64_t, const A*, const RowsAt<A>&, int64_t, int64_t, A*);
// `EXTERN` is nothing in products.cpp.
#ifdef AI3_ONLY_FLOAT32
#define AI3_ATTENTION_PRODUCTS_(EXTERN) AI3_ATTENTION_PRODUCTS_OF_(EXTERN, float)
#else
#define AI3_ATTENTION_PRODUCTS_(EXTERN) AI3_ATTENTION_PRODUCTS_OF_(EXTERN, float) AI3_ATTENTION_PRODUCTS_OF_(EXTERN, double)
#endif
#ifndef AI3_DEFINES_ATTENTION_PRODUCTS
AI3_ATTENTION_PRODUCTS_(extern)
#endif

}  // namespace ai3::inline AI3_LEVEL

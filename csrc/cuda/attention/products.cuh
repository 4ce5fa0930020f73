// The products of attention, by cuBLAS, for every batch and head; and rows of keys and values as they need them.
#pragma once
#include <utility>

#include "../core/cublas.cuh"
#include "../core/device.cuh"
#include "scores.cuh"

namespace ai3::inline AI3_LEVEL {

// A row-major matrix, or what is read as one with rows and columns exchanged.
struct Matrix {
  const void* data;
  int64_t leading;
  bool transposed = false;
};
inline Gemm product(int64_t m, int64_t n, int64_t k, const Matrix& a, const Matrix& b, void* c, int64_t ldc, bool add = false) {
  return {m, n, k, a.data, a.leading, 0, a.transposed, b.data, b.leading, 0, b.transposed, c, ldc, 0, 1, add};
}
// From one row of `size` elements to the next; any will do where there is one row.
inline int64_t leading(int64_t row, int64_t size) { return row > size ? row : size > 1 ? size : 1; }

// How many there are in one dimension of batches or heads, and how far apart they lie in the operands of a product.
struct Apart {
  int64_t count, a, b, c;
};
// g for all of them: one call where one stride leads through all, else a loop around the longest dimension that has one.
inline void multiply(DType dtype, DType sums, Gemm g, Apart outer, Apart middle, Apart inner, void* scratch) {
  auto join = [](Apart& x, Apart& y) {  // y's are x's parts
    const bool one = x.count == 1 || y.count == 1 || (x.a == y.a * y.count && x.b == y.b * y.count && x.c == y.c * y.count);
    if (!one) return;
    const int64_t count = x.count * y.count;
    if (y.count == 1) y = x;
    y.count = count, x.count = 1;
  };
  join(outer, middle), join(middle, inner), join(outer, middle);
  if (middle.count > inner.count) std::swap(middle, inner);
  if (outer.count > inner.count) std::swap(outer, inner);
  g.batch = inner.count, g.stride_a = inner.a, g.stride_b = inner.b, g.stride_c = inner.c;
  for (int64_t i = 0; i < outer.count; i++)
    for (int64_t j = 0; j < middle.count; j++) {
      Gemm one = g;
      one.a = static_cast<const char*>(g.a) + (i * outer.a + j * middle.a) * size_of(dtype);
      one.b = static_cast<const char*>(g.b) + (i * outer.b + j * middle.b) * size_of(dtype);
      one.c = static_cast<char*>(g.c) + (i * outer.c + j * middle.c) * size_of(sums);
      cublas_gemm(dtype, sums, false, one, scratch);
    }
}
// Rows of keys, values or queries, as one contiguous tensor (outer, batch, heads, rows, size) or where they lie.
template <class T>
struct Rows {
  const T* data;
  AttentionStrides at;
  int64_t batch, heads, rows, size;
  int64_t count() const { return batch * heads * rows; }  // `batch`: of all outer ones
  AttentionStrides dense(int64_t outer_batch) const {
    return {outer_batch * heads * rows * size, heads * rows * size, rows * size, size};
  }
};

// A warp for each row.
constexpr int kRowThreads = 128;
inline int64_t blocks_for_warps(int64_t rows) { return blocks_for(ceil_div(rows, kRowThreads / kWarp)); }

template <class A>
__device__ __forceinline__ bool is_finite(A x) {
  return x - x == A(0);
}
// Copies rows in the accumulator's type, those that are not `used` as zeros. Where `unclean` is given, what is not finite becomes
// 0 there, and it gets whether a row had any such.
struct EveryRow {
  __device__ constexpr bool operator()(int64_t) const { return true; }
};
template <class T, class Used>
__global__ void __launch_bounds__(kRowThreads)
    copy_rows(Rows<T> from, int64_t outer_batch, Used used, Acc<T>* to, int32_t* unclean) {
  const int64_t warps = kRowThreads / kWarp, lane = threadIdx.x % kWarp;
  for (int64_t r = blockIdx.x * warps + threadIdx.x / kWarp; r < from.batch * from.heads * from.rows; r += gridDim.x * warps) {
    const Quotient by_head = divided(r, from.rows), by_batch = divided(by_head.quotient, from.heads),
                   by_outer = divided(by_batch.quotient, outer_batch);
    const T* const row = from.data + by_outer.quotient * from.at.outer + by_outer.rest * from.at.batch +
                         by_batch.rest * from.at.head + by_head.rest * from.at.row;
    int32_t odd = 0;
    const bool as_it_is = used(r);
    for (int64_t c = lane; c < from.size; c += kWarp) {
      const Acc<T> value = as_it_is ? load_acc(row + c) : Acc<T>(0);
      const bool keep = !unclean || is_finite(value);
      to[r * from.size + c] = keep ? value : Acc<T>(0);
      odd |= !keep;
    }
    if (!unclean) continue;
    odd = of_warp(odd, Largest());
    if (lane == 0) unclean[r] = odd;
  }
}
// How many rows of each head are unclean.
inline __global__ void __launch_bounds__(kRowThreads)
    count_unclean(int64_t heads, int64_t rows, const int32_t* unclean, int32_t* counts) {
  int32_t* const memory = shared<int32_t>();
  for (int64_t h = blockIdx.x; h < heads; h += gridDim.x) {
    int32_t sum = 0;
    for (int64_t r = threadIdx.x; r < rows; r += kRowThreads) sum += unclean[h * rows + r];
    sum = reduce<kRowThreads>(sum, memory, Sum());
    if (threadIdx.x == 0) counts[h] = sum;
  }
}

// Keys or values as the right operand of a product with weights. Those of hidden keys are 0, and 0 times NaN is not: where some
// are hidden, what is not finite is left out of the product, and added afterwards where it is seen.
template <class T>
struct Weighted {
  using A = Acc<T>;
  Rows<T> from;
  const A* data;
  AttentionStrides at;
  const int32_t *unclean = nullptr, *counts = nullptr;

  static bool copies(bool hides) { return sizeof(T) != sizeof(A) || hides; }
  static int64_t bytes(int64_t heads, int64_t rows, int64_t size, bool hides) {
    if (!copies(hides)) return 0;
    const int64_t all = piece_bytes<A>(checked_product({heads, rows, size}));
    if (!hides) return all;
    return checked_add(all, checked_add(piece_bytes<int32_t>(checked_mul(heads, rows)), piece_bytes<int32_t>(heads)));
  }
  Weighted(const Rows<T>& rows, int64_t outer_batch, bool hides, Workspace& workspace, const char* what) : from(rows) {
    if (!copies(hides)) {
      data = reinterpret_cast<const A*>(rows.data), at = rows.at;
      return;
    }
    const int64_t count = rows.count(), heads = rows.batch * rows.heads;
    A* const to = take<A>(workspace, count * rows.size);
    int32_t* const flags = hides ? take<int32_t>(workspace, count) : nullptr;
    data = to, at = rows.dense(outer_batch), unclean = flags;
    launch(copy_rows<T, EveryRow>, {blocks_for_warps(count)}, kRowThreads, 0, workspace, what, rows, outer_batch, EveryRow{}, to,
           flags);
    if (!hides) return;
    int32_t* const sums = take<int32_t>(workspace, heads);
    counts = sums;
    launch(count_unclean, {blocks_for(heads)}, kRowThreads, reduce_bytes<int32_t>(kRowThreads), workspace, what, heads, rows.rows,
           unclean, sums);
  }
};
// Adds what Weighted left out to the products of a chunk's weights: rows of `ld` weights, one for each key.
template <class S, class T = typename S::Element>
__global__ void __launch_bounds__(kRowThreads)
    add_unclean(S of, Chunk chunk, const Acc<T>* weights, int64_t ld, Weighted<T> values, Acc<T>* to, AttentionStrides at) {
  const int64_t group = of.heads / of.kv_heads, rows = chunk.batches * of.heads * chunk.queries;
  for (int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
    const ScoreRow row = of.row(chunk, r);
    const int64_t head = (row.outer * of.batch + row.batch) * of.kv_heads + row.head / group;
    if (values.counts[head] == 0 || !of.computes(row)) continue;
    const T* const from = values.from.data + row.outer * values.from.at.outer + row.batch * values.from.at.batch +
                          row.head / group * values.from.at.head;
    for (int64_t c = threadIdx.x; c < values.from.size; c += kRowThreads) {
      Acc<T> sum = 0;
      for (int64_t j = row.first; j < row.end; j++) {
        if (!values.unclean[head * of.keys + j] || !of.reaches(row, j) || !of.sees(row, j)) continue;
        const Acc<T> value = load_acc(from + j * values.from.at.row + c);
        if (!is_finite(value)) sum += weights[r * ld + j] * value;
      }
      if (sum != 0) to[S::offset(row, at) + c] += sum;
    }
  }
}

// Of rows that gradients are summed from, zeros in place of those that see no key or are another pass's: their weights are 0, and
// 0 times NaN is not.
template <class S>
struct RowsThatSee {
  S of;
  const typename S::A* logsumexp;
  __device__ bool operator()(int64_t r) const {
    ScoreRow row;
    const Quotient by_head = divided(r, of.queries), by_batch = divided(by_head.quotient, of.heads),
                   by_outer = divided(by_batch.quotient, of.batch);
    row.outer = by_outer.quotient, row.batch = by_outer.rest, row.head = by_batch.rest, row.query = by_head.rest, row.number = r;
    return of.computes(row) && logsumexp[r] != S::kHidden;
  }
};

// What was computed in the accumulator's type becomes elements.
template <class T>
void narrow_to(T* to, const Acc<T>* from, int64_t count, const Workspace& workspace, const char* what) {
  for_each(count, workspace, what, [=] __device__(int64_t i) { store_acc(to + i, from[i]); });
}
// The same of rows that may lie apart; zeros from null.
template <class T>
void store_rows(const Acc<T>* from, int64_t rows, int64_t outer_batch, int64_t heads, int64_t queries, int64_t size, T* to,
                const AttentionStrides& at, const Workspace& workspace, const char* what) {
  for_each(rows * size, workspace, what, [=] __device__(int64_t i) {
    const Quotient element = divided(i, size), query = divided(element.quotient, queries), head = divided(query.quotient, heads),
                   batch = divided(head.quotient, outer_batch);
    store_acc(to + batch.quotient * at.outer + batch.rest * at.batch + head.rest * at.head + query.rest * at.row + element.rest,
              from ? from[i] : Acc<T>(0));
  });
}

}  // namespace ai3::inline AI3_LEVEL

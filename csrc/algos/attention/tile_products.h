// The two products of attention in tiles, scores = keys * queries and sums += values * weights, of panels of queries that pass
// over the same tile of keys.
#pragma once
#include "tiles.h"

namespace ai3::inline AI3_LEVEL {
namespace {

// In the accumulator's type: keys and values are rows that are read where they are, or widened once for all panels.
template <class T>
class WideProducts {
  using A = Acc<T>;
  static constexpr int64_t P = kPanel<A>;
  const AttentionProblem& p;
  const int64_t ld = padded<A>(p.value_size);
  A *const packed, *const sums, *const of_keys, *const of_values;
  RowsAt<A> k = {}, v = {};

  static RowsAt<A> from(const RowsAt<A>& rows, int64_t row) { return {rows.data + row * rows.stride, rows.stride}; }

 public:
  static int64_t size(const AttentionProblem& p, int64_t tile) {
    return cut_size<A>({checked_mul(tile, p.size), checked_mul(tile, padded<A>(p.value_size)), buffer_of<T>(kKeys, p.size, false),
                        buffer_of<T>(kKeys, p.value_size, true)});
  }
  WideProducts(const AttentionProblem& problem, int64_t tile, Cut<A>& cut)
      : p(problem),
        packed(cut.take(tile * p.size)),
        sums(cut.take(tile * ld)),
        of_keys(cut.take(buffer_of<T>(kKeys, p.size, false))),
        of_values(cut.take(buffer_of<T>(kKeys, p.value_size, true))) {}

  // Panel b gets so many queries, and sums of 0.
  void begin(int64_t b, const RowsAt<T>& query, int64_t queries) {
    pack_rows(query.data, query.stride, queries, p.size, p.scale, packed + b * P * p.size);
    for (int64_t i = 0; i < P * ld; i += Vec<A>::width) store(sums + b * P * ld + i, Vec<A>(A(0)));
  }
  // The tile of keys that the functions below count from.
  void read(const RowsAt<T>& key, const RowsAt<T>& value, int64_t count) {
    k = rows_at(key.data, key.stride, count, p.size, false, of_keys);
    v = rows_at(value.data, value.stride, count, p.value_size, true, of_values);
  }
  bool values_finite(int64_t count) const { return all_finite(v, count, p.value_size); }
  // scores[key][query], of the panel's first vector alone where `half`.
  void score(int64_t b, Range keys, bool half, A* scores) const {
    const A* const panel = packed + b * P * p.size;
    const RowsAt<A> rows = from(k, keys.begin);
    half ? multiply_rows<A, true>(rows, keys.size(), panel, p.size, scores)
         : multiply_rows(rows, keys.size(), panel, p.size, scores);
  }
  // The sums so far, of each query by a factor.
  void rescale(int64_t b, int64_t queries, const A* scale) { scale_rows(sums + b * P * ld, queries, p.value_size, scale); }
  // `weights` lie as scores do, and are spent.
  void add(int64_t b, int64_t queries, Range keys, A* weights) {
    add_weighted(queries, weights, from(v, keys.begin), keys.size(), p.value_size, sums + b * P * ld);
  }
  // The same of what seen(query, key) says alone, counted from the panel's first one and keys.begin.
  template <class Seen>
  void add_seen(int64_t b, int64_t queries, Range keys, const A* weights, const Seen& seen) {
    add_weighted_seen(queries, weights, from(v, keys.begin), keys.size(), p.value_size, sums + b * P * ld, seen);
  }
  // The sums, of each query by a factor, go to output(query), where that is not null.
  template <class OutputOf>
  void end(int64_t b, int64_t queries, const A* share, const OutputOf& output) {
    for (int64_t r = 0; r < queries; r++)
      if (T* const to = output(r))
        for (int64_t c = 0; c < p.value_size; c += Vec<A>::width)
          store_some(to + c, load(sums + (b * P + r) * ld + c) * Vec<A>(share[r]), smaller(Vec<A>::width, p.value_size - c));
  }
};

// Of pairs of bfloat16 (micro_kernel.h), by the same functions: keys are rows of pairs along the head where they are, values are
// transposed once for all panels, [element][key], to be rows of pairs along the keys. So sums lie [element][query]. Weights are
// rounded to bfloat16, as PyTorch's are; their own sums, the softmax's, are not.
class PairProducts {
  static constexpr int64_t P = kPanel<float>, width = Vec<float>::width,
                           kValuesRow = (kKeys / (2 * width) + 1) * 2 * width;  // a whole number of vectors
  const AttentionProblem& p;
  const int64_t pairs = p.size / 2;
  // The scale: queries take its power of two, in which nothing is rounded, scores the rest, from 1 up to 2.
  const float before = power_of_two(p.scale), after = static_cast<float>(p.scale / static_cast<double>(before));
  float *const packed, *const sums;
  bfloat16* const of_values;
  RowsAt<bfloat16> k = {}, v = {};

  static float power_of_two(double scale) {
    constexpr int kMost = 16;  // so that few queries become subnormal
    int exponent = 0;
    __builtin_frexp(scale, &exponent);
    return static_cast<float>(__builtin_ldexp(1, static_cast<int>(larger(-kMost, smaller(kMost, exponent - 1)))));
  }

 public:
  static bool fit(const AttentionProblem& p) { return has_pair_products() && p.size % 2 == 0 && p.size > 0; }
  static int64_t size(const AttentionProblem& p, int64_t tile) {
    return cut_size<float>(
        {checked_mul(tile, p.size / 2), checked_mul(tile, p.value_size), checked_mul(p.value_size, kValuesRow / 2)});
  }
  PairProducts(const AttentionProblem& problem, int64_t tile, Cut<float>& cut)
      : p(problem),
        packed(cut.take(tile * pairs)),
        sums(cut.take(tile * p.value_size)),
        of_values(reinterpret_cast<bfloat16*>(cut.take(p.value_size * (kValuesRow / 2)))) {}

  void begin(int64_t b, const RowsAt<bfloat16>& query, int64_t queries) {
    pack_pair_panels(query.data, p.size, queries, query.stride, packed + b * P * pairs, P * pairs, before);
    for (int64_t i = 0; i < P * p.value_size; i += width) store(sums + b * P * p.value_size + i, Vec<float>(0.f));
  }
  void read(const RowsAt<bfloat16>& key, const RowsAt<bfloat16>& value, int64_t count) {
    k = key, v = value;
    for (int64_t j = 0; j < count; j += 2 * width)
      for (int64_t c = 0; c < p.value_size; c += width) {
        const int64_t columns = smaller(width, p.value_size - c);
        Vec<float> square[width];
#pragma GCC unroll 16
        for (int64_t r = 0; r < width; r++) {
          const int64_t row = j + 2 * r;
          square[r] = Vec<float>(0.f);
          if (row >= count) continue;
          const bfloat16* const first = v.data + row * v.stride + c;
          detail::Words pair = detail::bit_cast<detail::Words>(load_some(first, columns).raw) >> 16;
          if (row + 1 < count) pair |= detail::bit_cast<detail::Words>(load_some(first + v.stride, columns).raw);
          square[r] = Vec<float>(detail::bit_cast<Vec<float>::Raw>(pair));
        }
        transpose(square);
#pragma GCC unroll 16
        for (int64_t r = 0; r < width; r++)
          if (r < columns) __builtin_memcpy(of_values + (c + r) * kValuesRow + j, &square[r], sizeof(square[r]));
      }
  }
  bool values_finite(int64_t count) const { return all_finite(v, count, p.value_size); }
  void score(int64_t b, Range keys, bool half, float* scores) const {
    multiply_pair_rows(k.data + keys.begin * k.stride, k.stride, keys.size(), packed + b * P * pairs, half ? width : P, pairs,
                       scores, false);
    if (after == 1) return;
    const Vec<float> factor(after);
    for (int64_t j = 0; j < keys.size(); j++)
      for (int64_t c = 0; c < (half ? width : P); c += width) store(scores + j * P + c, load(scores + j * P + c) * factor);
  }
  void rescale(int64_t b, int64_t, const float* scale) {
    const Vec<float> left = load(scale), right = load(scale + width);
    float* const to = sums + b * P * p.value_size;
    for (int64_t i = 0; i < P * p.value_size; i += P)
      store(to + i, load(to + i) * left), store(to + i + width, load(to + i + width) * right);
  }
  // keys.begin is even. A last key without another one is a pair with a weight of 0.
  void add(int64_t b, int64_t queries, Range keys, float* weights) {
    const int64_t lanes = queries > width ? P : width, count = keys.size();
    for (int64_t j = 0; j < count; j += 2)
      for (int64_t c = 0; c < lanes; c += width)
        store(weights + j / 2 * P + c,
              pairs_of(load(weights + j * P + c), j + 1 < count ? load(weights + (j + 1) * P + c) : Vec<float>(0.f)));
    multiply_pair_rows(of_values + keys.begin, kValuesRow, p.value_size, weights, lanes, ceil_div(count, 2),
                       sums + b * P * p.value_size, true);
  }
  template <class Seen>
  void add_seen(int64_t b, int64_t queries, Range keys, const float* weights, const Seen& seen) {
    float* const to = sums + b * P * p.value_size;
    for (int64_t q = 0; q < queries; q++)
      for (int64_t j = 0; j < keys.size(); j++)
        if (seen(q, j))
          for (int64_t c = 0; c < p.value_size; c++)
            to[c * P + q] += weights[j * P + q] * widen(v.data[(keys.begin + j) * v.stride + c]);
  }
  template <class OutputOf>
  void end(int64_t b, int64_t queries, const float* share, const OutputOf& output) {
    const float* const all = sums + b * P * p.value_size;
    for (int64_t q = 0; q < queries; q += width)
      for (int64_t c = 0; c < p.value_size; c += width) {
        const Vec<float> factor = load(share + q);
        Vec<float> square[width];
#pragma GCC unroll 16
        for (int64_t r = 0; r < width; r++)
          square[r] = r < p.value_size - c ? load(all + (c + r) * P + q) * factor : Vec<float>(0.f);
        transpose(square);
#pragma GCC unroll 16
        for (int64_t r = 0; r < width; r++)
          if (r < queries - q)
            if (bfloat16* const to = output(q + r)) store_some(to + c, square[r], smaller(width, p.value_size - c));
      }
  }
};

// body.operator()<Products>()
template <class T, class Body>
AI3_INLINE auto with_products(const AttentionProblem& p, const Body& body) {
  if constexpr (dtype_of<T> == DType::bf16 && AI3_VECTOR_BYTES == 64)
    if (PairProducts::fit(p)) return body.template operator()<PairProducts>();
  return body.template operator()<WideProducts<T>>();
}

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

// The two products of a tile of flash attention, scores = keys * queries and sums += values * weights, of panels of queries that
// pass over the same tile of keys.
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

  void begin(int64_t b, const T* query, int64_t queries) {
    pack_rows(query, p.query_at.row, queries, p.size, p.scale, packed + b * P * p.size);
    for (int64_t i = 0; i < P * ld; i += Vec<A>::width) store(sums + b * P * ld + i, Vec<A>(A(0)));
  }
  void read(const T* key, const T* value, int64_t count) {
    k = rows_at(key, p.key_at.row, count, p.size, false, of_keys);
    v = rows_at(value, p.value_at.row, count, p.value_size, true, of_values);
  }
  void score(int64_t b, int64_t keys, bool half, A* scores) const {
    const A* const panel = packed + b * P * p.size;
    half ? multiply_rows<A, true>(k, keys, panel, p.size, scores) : multiply_rows(k, keys, panel, p.size, scores);
  }
  bool finite(int64_t count) const { return all_finite(v, count, p.value_size); }
  void rescale(int64_t b, int64_t queries, const A* scale) { scale_rows(sums + b * P * ld, queries, p.value_size, scale); }
  void add(int64_t b, int64_t queries, int64_t keys, A* weights) {
    add_weighted(queries, weights, v, keys, p.value_size, sums + b * P * ld);
  }
  template <class Seen>
  void add_seen(int64_t b, int64_t queries, int64_t keys, const A* weights, const Seen& seen) {
    add_weighted_seen(queries, weights, v, keys, p.value_size, sums + b * P * ld, seen);
  }
  void end(int64_t b, int64_t queries, const A* share, T* output) {
    for (int64_t r = 0; r < queries; r++)
      for (int64_t c = 0; c < p.value_size; c += Vec<A>::width)
        store_some(output + r * p.output_at.row + c, load(sums + (b * P + r) * ld + c) * Vec<A>(share[r]),
                   smaller(Vec<A>::width, p.value_size - c));
  }
};

// Of pairs of bfloat16 (micro_kernel.h), in the same layouts: keys are rows of pairs along the head where they are, values along
// the keys, [element][key], transposed once for all panels. So are sums, [element][query]. Weights are rounded to bfloat16, as
// PyTorch's are; their sums are not.
class PairProducts {
  static constexpr int64_t P = kPanel<float>, width = Vec<float>::width,
                           kValuesRow = (kKeys / (2 * width) + 1) * 2 * width;  // of elements, a whole number of vectors
  const AttentionProblem& p;
  const int64_t pairs = p.size / 2;
  const bool exact = scale_is_exact(p.scale);
  float *const packed, *const sums;
  bfloat16* const of_values;
  const bfloat16 *k = nullptr, *v = nullptr;

  // Whether products with it are not rounded: those of queries then are what is packed.
  static bool scale_is_exact(double scale) {
    int exponent = 0;
    return __builtin_frexp(scale, &exponent) == 0.5 && exponent > -16 && exponent < 16;
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

  void begin(int64_t b, const bfloat16* query, int64_t queries) {
    const Vec<float> factor(exact ? static_cast<float>(p.scale) : 1.f);
    float* const to = packed + b * P * pairs;
    for (int64_t q = 0; q < P; q += width)
      for (int64_t c = 0; c < pairs; c += width) {
        Vec<float> square[width];
#pragma GCC unroll 16
        for (int64_t r = 0; r < width; r++) {
          square[r] = Vec<float>(0.f);
          if (q + r >= queries) continue;
          const bfloat16* const from = query + (q + r) * p.query_at.row + 2 * c;
          const int64_t rest = p.size - 2 * c;
          const Vec<float> left = load_some(from, smaller(width, rest)),
                           right = rest > width ? load_some(from + width, smaller(width, rest - width)) : Vec<float>(0.f);
          bfloat16 rounded[2 * width];
          store_rounded(rounded, left * factor, right * factor);
          __builtin_memcpy(&square[r], rounded, sizeof(rounded));
        }
        transpose(square);
#pragma GCC unroll 16
        for (int64_t r = 0; r < width; r++)
          if (r < pairs - c) store(to + (c + r) * P + q, square[r]);
      }
    for (int64_t i = 0; i < P * p.value_size; i += width) store(sums + b * P * p.value_size + i, Vec<float>(0.f));
  }
  void read(const bfloat16* key, const bfloat16* value, int64_t count) {
    k = key, v = value;
    for (int64_t j = 0; j < count; j += 2 * width)
      for (int64_t c = 0; c < p.value_size; c += width) {
        const int64_t columns = smaller(width, p.value_size - c);
        Vec<float> square[width];
#pragma GCC unroll 16
        for (int64_t r = 0; r < width; r++) {
          const int64_t row = j + 2 * r;
          const bfloat16* const from = value + row * p.value_at.row + c;
          square[r] = Vec<float>(0.f);
          if (row >= count) continue;
          detail::Words pair = detail::bit_cast<detail::Words>(load_some(from, columns).raw) >> 16;
          if (row + 1 < count) pair |= detail::bit_cast<detail::Words>(load_some(from + p.value_at.row, columns).raw);
          square[r] = Vec<float>(detail::bit_cast<Vec<float>::Raw>(pair));
        }
        transpose(square);
        for (int64_t r = 0; r < columns; r++)
          __builtin_memcpy(of_values + (c + r) * kValuesRow + j, &square[r], sizeof(square[r]));
      }
  }
  void score(int64_t b, int64_t keys, bool half, float* scores) const {
    multiply_pair_rows(k, p.key_at.row, keys, packed + b * P * pairs, half ? width : P, pairs, scores, false);
    if (exact) return;
    const Vec<float> factor(static_cast<float>(p.scale));
    for (int64_t i = 0; i < keys * P; i += width) store(scores + i, load(scores + i) * factor);
  }
  bool finite(int64_t count) const { return all_finite(RowsAt<bfloat16>{v, p.value_at.row}, count, p.value_size); }
  void rescale(int64_t b, int64_t, const float* scale) {
    const Vec<float> left = load(scale), right = load(scale + width);
    float* const to = sums + b * P * p.value_size;
    for (int64_t i = 0; i < P * p.value_size; i += P)
      store(to + i, load(to + i) * left), store(to + i + width, load(to + i + width) * right);
  }
  // A last key without another one is a pair with a weight of 0.
  void add(int64_t b, int64_t queries, int64_t keys, float* weights) {
    const int64_t lanes = queries > width ? P : width;
    for (int64_t j = 0; j < keys; j += 2)
      for (int64_t c = 0; c < lanes; c += width)
        store(weights + j / 2 * P + c,
              pairs_of(load(weights + j * P + c), j + 1 < keys ? load(weights + (j + 1) * P + c) : Vec<float>(0.f)));
    multiply_pair_rows(of_values, kValuesRow, p.value_size, weights, lanes, ceil_div(keys, 2), sums + b * P * p.value_size, true);
  }
  template <class Seen>
  void add_seen(int64_t b, int64_t queries, int64_t keys, const float* weights, const Seen& seen) {
    float* const to = sums + b * P * p.value_size;
    for (int64_t q = 0; q < queries; q++)
      for (int64_t j = 0; j < keys; j++)
        if (seen(q, j))
          for (int64_t c = 0; c < p.value_size; c++) to[c * P + q] += weights[j * P + q] * widen(v[j * p.value_at.row + c]);
  }
  void end(int64_t b, int64_t queries, const float* share, bfloat16* output) {
    rescale(b, queries, share);
    store_block(Output<bfloat16>{output, 1, p.output_at.row}, sums + b * P * p.value_size, P, p.value_size, queries);
  }
};

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

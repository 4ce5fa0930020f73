// Which keys a query sees, and what its mask adds to their scores.
#pragma once
#include "../core/instances.h"
#include "../core/lanes.h"
#include "problem.h"

namespace ai3::inline AI3_LEVEL {

template <class A>
inline constexpr A kHidden = static_cast<A>(-__builtin_inf());

// One head of one batch, as offsets.
struct HeadAt {
  int64_t outer, batch, head, kv_head;
  AI3_INLINE HeadAt(const AttentionProblem& p, int64_t index)
      : outer(index / (p.batch * p.heads)),
        batch(index / p.heads % p.batch),
        head(index % p.heads),
        kv_head(head / (p.heads / p.kv_heads)) {}
  AI3_INLINE int64_t of(const AttentionStrides& s) const { return outer * s.outer + batch * s.batch + head * s.head; }
  AI3_INLINE int64_t of_kv(const AttentionStrides& s) const { return outer * s.outer + batch * s.batch + kv_head * s.head; }
};

// The problem of one head, with as many keys as its batch has.
AI3_INLINE AttentionProblem of_head(const AttentionProblem& p, const Operand* own, const HeadAt& at) {
  AttentionProblem one = p;
  if (const Operand& lengths = own[Dense::key_lengths])
    one.keys = lengths.read<int64_t>()[at.outer * stride_of(lengths, 1) + at.batch * stride_of(lengths, 0)];
  return one;
}

// How many keys lie behind query i's own one, of those that it sees, and before: more than there are where nothing hides any.
AI3_INLINE int64_t behind(const AttentionProblem& p) {
  const int64_t all = p.keys + p.queries, window = p.window_right < 0 ? all : smaller(p.window_right, all);
  return p.causal || p.lower_right ? 0 : window;
}
AI3_INLINE int64_t before(const AttentionProblem& p) {
  const int64_t all = p.keys + p.queries;
  return p.window_left < 0 ? all : smaller(p.window_left, all);
}
AI3_INLINE int64_t own_key(const AttentionProblem& p, int64_t i) { return p.lower_right ? i + p.keys - p.queries : i; }
// The keys that query i sees before the mask is asked: from first_key up to keys_of. Neither is less for a later query.
AI3_INLINE int64_t keys_of(const AttentionProblem& p, int64_t i) {
  return larger(0, smaller(own_key(p, i) + behind(p) + 1, p.keys));
}
AI3_INLINE int64_t first_key(const AttentionProblem& p, int64_t i) { return larger(0, own_key(p, i) - before(p)); }
// The queries that see key j before the mask is asked.
AI3_INLINE Range queries_of(const AttentionProblem& p, int64_t j) {
  const int64_t own = p.lower_right ? j + p.queries - p.keys : j;
  return {larger(0, own - behind(p)), larger(0, smaller(own + before(p) + 1, p.queries))};
}
AI3_INLINE bool hides_some(const AttentionProblem& p) {
  return p.causal || p.lower_right || p.window_left >= 0 || p.window_right >= 0;
}

// rows[i][j] becomes rows[j][i]: interleaving rows i and i + 8 moves the eight bits of a byte's place by one, so four times by
// half.
typedef uint8_t Bytes __attribute__((vector_size(16)));
AI3_INLINE void transpose(Bytes (&rows)[16]) {
#pragma GCC unroll 4
  for (int round = 0; round < 4; round++) {
    Bytes next[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
      const Bytes low = rows[i], high = rows[i + 8];
      next[2 * i] = __builtin_shufflevector(low, high, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      next[2 * i + 1] = __builtin_shufflevector(low, high, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) rows[i] = next[i];
  }
}
// -inf where a byte is -1, and 0 where it is 0.
AI3_INLINE Vec<float> hidden_where(const int8_t* bytes) {
#if AI3_VECTOR_BYTES == 64
  const auto lanes = _mm512_maskz_cvtepi8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
#elif AI3_VECTOR_BYTES == 32
  const auto lanes = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)));
#else
  detail::Words lanes;
  for (int i = 0; i < Vec<float>::width; i++) lanes[i] = static_cast<uint32_t>(bytes[i]);
#endif
  return detail::bit_cast<Vec<float>::Raw>(detail::bit_cast<detail::Words>(lanes) & 0xff800000u);
}

// The mask of one head; what it adds to scores, where `hidden` hides a key. Compiled once, as products.h is.
template <class A>
struct MaskRows {
  const char* data;
  DType dtype;
  int64_t row, column;
  AI3_INLINE MaskRows(const AttentionProblem& p, const Operand& mask, const HeadAt& at)
      : data(mask.read<char>()), dtype(p.mask_dtype), row(p.mask_at.row), column(p.mask_column) {
    if (data) data += at.of(p.mask_at) * size_of(dtype);
  }
  AI3_INLINE explicit operator bool() const { return data; }
  template <class M>
  AI3_INLINE static A added(M value) {
    if constexpr (sizeof(M) == 1)
      return value ? A(0) : kHidden<A>;
    else
      return static_cast<A>(widen(value));
  }
  template <class Body>
  AI3_INLINE void with_elements(const Body& body) const {
    switch (dtype) {
      case DType::boolean: return body(reinterpret_cast<const uint8_t*>(data));
      case DType::f64: return body(reinterpret_cast<const double*>(data));
      case DType::bf16: return body(reinterpret_cast<const bfloat16*>(data));
      case DType::f16: return body(reinterpret_cast<const float16*>(data));
      default: return body(reinterpret_cast<const float*>(data));
    }
  }
  // Of query i and the keys from `first` on.
  [[gnu::noinline]] void read_row(int64_t i, int64_t first, int64_t count, A* to) const {
    with_elements([&]<class M>(const M* all) {
      const M* from = all + i * row + first * column;
      if (column == 1)  // a loop that the compiler makes vectors of
        for (int64_t j = 0; j < count; j++) to[j] = added(from[j]);
      else
        for (int64_t j = 0; j < count; j++) to[j] = added(from[j * column]);
    });
  }
  // Of up to a panel's queries and `keys` keys: to[key][query of the panel], hidden behind the last query.
  [[gnu::noinline]] void read_panel(int64_t i, int64_t queries, int64_t first, int64_t keys, A* to) const {
    constexpr int64_t P = kPanel<A>;
    with_elements([&]<class M>(const M* all) {
      const M* from = all + i * row + first * column;
      if constexpr (sizeof(M) == 1 && sizeof(A) == 4)
        if (column == 1) return read_bytes(from, queries, keys, to);
      if (queries < P)
        for (int64_t s = 0; s < keys * P; s++) to[s] = kHidden<A>;
      if constexpr (sizeof(M) > 1 && sizeof(Acc<M>) == sizeof(A))
        copy_rows(from, column, row, keys, queries, to, P);
      else
        for (int64_t q = 0; q < queries; q++)
          for (int64_t j = 0; j < keys; j++) to[j * P + q] = added(from[q * row + j * column]);
    });
  }
  // The same of booleans that lie beside each other for neighbouring keys, 16 x 16 at a time.
  void read_bytes(const uint8_t* from, int64_t queries, int64_t keys, A* to) const requires(sizeof(A) == 4) {
    constexpr int64_t P = kPanel<A>, width = Vec<A>::width;
    for (int64_t q = 0; q < P; q += 16)
      for (int64_t j = 0; j < keys; j += 16) {
        Bytes tile[16];
        const int64_t count = smaller(16, keys - j);
        for (int64_t r = 0; r < 16; r++) {
          tile[r] = Bytes{};
          if (q + r < queries) {
            const uint8_t* const some = from + (q + r) * row + j;
            count == 16 ? __builtin_memcpy(&tile[r], some, 16) : __builtin_memcpy(&tile[r], some, static_cast<size_t>(count));
          }
        }
        transpose(tile);
        for (int64_t r = 0; r < count; r++) {
          const Bytes hidden = tile[r] == 0;
          for (int64_t l = 0; l < smaller(16, P - q); l += width)
            store(to + (j + r) * P + q + l, hidden_where(reinterpret_cast<const int8_t*>(&hidden) + l));
        }
      }
  }
  AI3_INLINE bool hides(int64_t i, int64_t j) const {
    A one;
    read_row(i, j, 1, &one);
    return one == kHidden<A>;
  }
};

#ifdef AI3_ONLY_FLOAT32
#define AI3_ATTENTION_MASKS_(...) __VA_ARGS__ template struct MaskRows<float>;
#else
#define AI3_ATTENTION_MASKS_(...)              \
  __VA_ARGS__ template struct MaskRows<float>; \
  __VA_ARGS__ template struct MaskRows<double>;
#endif
#ifndef AI3_DEFINES_ATTENTION_PRODUCTS
AI3_ATTENTION_MASKS_(extern)
#endif

namespace {

// What is added to the scores of one head by where queries and keys are, before its mask.
template <class T>
struct Positions {
  using A = Acc<T>;
  A slope = 0;
  const T *rel_h = nullptr, *rel_w = nullptr;  // of query 0
  int64_t height = 0, width = 1, rel_h_row = 0, rel_w_row = 0;
  bool has_slope;

  AI3_INLINE Positions(const AttentionProblem& p, const Operand* own, const HeadAt& at) : has_slope(own[Dense::alibi_slopes]) {
    const Operand &slopes = own[Dense::alibi_slopes], &h = own[Dense::rel_h], &w = own[Dense::rel_w];
    if (slopes) slope = widen(slopes.read<T>()[at.head * stride_of(slopes, 0)]);
    if (!h) return;
    width = larger(p.rel_width, 1), height = h.sizes[h.rank - 1];
    const AttentionStrides h_at = strides_of(h, 2), w_at = strides_of(w, 2);
    rel_h = h.read<T>() + at.of(h_at), rel_w = w.read<T>() + at.of(w_at), rel_h_row = h_at.row, rel_w_row = w_at.row;
  }
  AI3_INLINE explicit operator bool() const { return has_slope || rel_h; }
  AI3_INLINE A distance(const AttentionProblem& p, int64_t i, int64_t j) const {
    const int64_t apart = own_key(p, i) - j;
    return static_cast<A>(apart < 0 ? -apart : apart);
  }
  AI3_INLINE A added(const AttentionProblem& p, int64_t i, int64_t j) const {
    A sum = has_slope ? -slope * distance(p, i, j) : A(0);
    if (rel_h) sum += widen(rel_h[i * rel_h_row + j / width]) + widen(rel_w[i * rel_w_row + j % width]);
    return sum;
  }
};

// Which weights dropout keeps, by 24 random bits for each that depend on the seed and its place alone (docs/attention.md), so
// that every pass finds the same ones: what a weight is multiplied by, 0 or the factor.
template <class A>
class Dropout {
 public:
  AI3_INLINE Dropout(const AttentionProblem& p, const Operand& seed)
      : used_(p.dropout > 0),
        seed_(used_ ? static_cast<uint64_t>(*seed.read<int64_t>()) : 0),
        least_(dropout_least(p.dropout)),
        factor_(static_cast<A>(1 / (1 - p.dropout))) {}
  AI3_INLINE explicit operator bool() const { return used_; }
  // Of a query, counted over all heads and batches, and `keys` keys.
  void of_row(int64_t row, int64_t key, int64_t keys, A* to) const {
    const uint64_t state = random_bits(seed_, row);
    for (int64_t l = 0; l < keys; l++)
      to[l] = multiplier(static_cast<uint32_t>(state), static_cast<uint32_t>(state >> 32), static_cast<uint32_t>(key + l));
  }
  // to[key][query], of `lanes` queries.
  template <int64_t lanes>
  void of_lanes(int64_t row, int64_t key, int64_t keys, A* to) const {
    uint32_t low[lanes], high[lanes];
    for (int64_t l = 0; l < lanes; l++) {
      const uint64_t state = random_bits(seed_, row + l);
      low[l] = static_cast<uint32_t>(state), high[l] = static_cast<uint32_t>(state >> 32);
    }
    for (int64_t r = 0; r < keys; r++)
      for (int64_t l = 0; l < lanes; l++) to[r * lanes + l] = multiplier(low[l], high[l], static_cast<uint32_t>(key + r));
  }

 private:
  AI3_INLINE A multiplier(uint32_t low, uint32_t high, uint32_t key) const {
    return dropout_bits(low, high, key) >= least_ ? factor_ : A(0);
  }
  bool used_;
  uint64_t seed_;
  uint32_t least_;
  A factor_;
};

// The further logit of a head's softmax; -inf of none.
template <class T>
AI3_INLINE Acc<T> sink_of(const Operand* own, const HeadAt& at) {
  const Operand& sinks = own[Dense::sinks];
  return sinks ? widen(sinks.read<T>()[at.head * stride_of(sinks, 0)]) : kHidden<Acc<T>>;
}
// By what a row's weighted sum is multiplied, and its log-sum-exp, of the largest score, the sum of exp(score - largest) and a
// sink.
template <class A>
struct RowEnd {
  A share;
  AI3_INLINE RowEnd(A most, double total, A sink)
      : most_(static_cast<double>(most)), total_(total), sink_(static_cast<double>(sink)) {
    share = static_cast<A>(total == 0 ? 0 : sink == kHidden<A> ? 1 / total : of_keys() / sum());
  }
  A logsumexp() const {
    if (sink_ != kHidden<double>) return static_cast<A>(top() + __builtin_log(sum()));
    return total_ == 0 ? kHidden<A> : static_cast<A>(most_) + static_cast<A>(__builtin_log(total_));
  }

 private:
  double top() const { return most_ > sink_ || most_ != most_ ? most_ : sink_; }
  double of_keys() const { return total_ == 0 ? 0 : __builtin_exp(most_ - top()); }
  double sum() const { return total_ * of_keys() + __builtin_exp(sink_ - top()); }

  double most_, total_, sink_;
};

template <class A>
AI3_INLINE bool sees(const AttentionProblem& p, const MaskRows<A>& mask, int64_t i, int64_t j) {
  return j >= first_key(p, i) && j < keys_of(p, i) && !(mask && mask.hides(i, j));
}

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

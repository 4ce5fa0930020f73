// What attention adds to its scores, and which keys a query sees, as its kernels ask; csrc/algos/attention/visible.h is the same
// for the CPU.
#pragma once
#include "../../algos/attention/problem.h"
#include "../core/block.cuh"

namespace ai3::inline AI3_LEVEL {

// Some queries of every head of some batches, all of one outer batch: what goes through the workspace at once. Rows of its
// buffers are counted [batch][head][query].
struct Chunk {
  int64_t outer, first_batch, batches, first_query, queries;
};

// One query of one head, and the keys from `first` up to `end` that it sees before the mask is asked.
struct ScoreRow {
  int64_t outer, batch, head, query, number;  // among those of all heads and batches
  int64_t own_key, first, end;
};

// What a pattern of keys changes of all that: here nothing. A kernel that passes over the keys of a row asks which of them a
// pattern reaches, and changes none of a row that is another pass's.
struct EveryKey {
  __device__ static constexpr bool computes(const ScoreRow&) { return true; }
  __device__ static constexpr bool reaches(const ScoreRow&, int64_t) { return true; }
  template <class A>
  __device__ static A added(const ScoreRow&, int64_t, A of_mask) {
    return of_mask;
  }
};

// T is the storage type of what a call's tensors hold; scores are computed in its accumulator.
template <class T, class Sight = EveryKey>
struct Scores : Sight {
  using Element = T;
  using A = Acc<T>;
  static constexpr A kHidden = -std::numeric_limits<A>::infinity();
  struct Positions {
    const T* data;
    AttentionStrides at;
  };

  int64_t batch, heads, kv_heads, queries, keys, before, behind;
  A scale, softcap;
  bool lower_right;
  const void* mask;
  DType mask_dtype;
  AttentionStrides mask_at;
  int64_t mask_column;
  const T *sinks, *slopes;
  int64_t sink_stride, slope_stride;
  const int64_t* lengths;
  AttentionStrides lengths_at;
  Positions rel_h, rel_w;
  int64_t width;
  const int64_t* seed;  // null: nothing is dropped
  uint32_t least;
  A factor;

  Scores(const AttentionProblem& p, const Operand& of_mask, const Operand* own, const Operand& dropout_seed)
      : batch(p.batch),
        heads(p.heads),
        kv_heads(p.kv_heads),
        queries(p.queries),
        keys(p.keys),
        scale(static_cast<A>(p.scale)),
        softcap(static_cast<A>(p.softcap)),
        lower_right(p.lower_right),
        mask(of_mask.data),
        mask_dtype(p.mask_dtype),
        mask_at(p.mask_at),
        mask_column(p.mask_column),
        sinks(own[Dense::sinks].read<T>()),
        slopes(own[Dense::alibi_slopes].read<T>()),
        sink_stride(sinks ? stride_of(own[Dense::sinks], 0) : 0),
        slope_stride(slopes ? stride_of(own[Dense::alibi_slopes], 0) : 0),
        lengths(own[Dense::key_lengths].read<int64_t>()),
        lengths_at{},
        rel_h(positions(own[Dense::rel_h])),
        rel_w(positions(own[Dense::rel_w])),
        width(p.rel_width > 0 ? p.rel_width : 1),
        seed(p.dropout > 0 ? dropout_seed.read<int64_t>() : nullptr),
        least(dropout_least(p.dropout)),
        factor(static_cast<A>(1 / (1 - p.dropout))) {
    const int64_t all = keys + queries;  // more than there are where nothing hides any
    auto window = [&](int64_t wide) { return wide < 0 || wide > all ? all : wide; };
    before = window(p.window_left), behind = p.causal || p.lower_right ? 0 : window(p.window_right);
    if (lengths) lengths_at = {stride_of(own[Dense::key_lengths], 1), stride_of(own[Dense::key_lengths], 0), 0, 0};
  }
  static Positions positions(const Operand& t) { return t ? Positions{t.read<T>(), strides_of(t, 2)} : Positions{}; }

  __device__ ScoreRow row(const Chunk& chunk, int64_t r) const {
    const Quotient by_head = divided(r, chunk.queries), by_batch = divided(by_head.quotient, heads);
    ScoreRow at;
    at.outer = chunk.outer, at.batch = chunk.first_batch + by_batch.quotient, at.head = by_batch.rest;
    at.query = chunk.first_query + by_head.rest;
    at.number = ((at.outer * batch + at.batch) * heads + at.head) * queries + at.query;
    int64_t seen = keys;  // of its batch
    if (lengths) {
      const int64_t length = lengths[at.outer * lengths_at.outer + at.batch * lengths_at.batch];
      seen = length < 0 ? 0 : length < keys ? length : keys;  // nobody could check them
    }
    at.own_key = lower_right ? at.query + seen - queries : at.query;
    const int64_t end = at.own_key + behind + 1, first = at.own_key - before;
    at.end = end < 0 ? 0 : end < seen ? end : seen;
    at.first = first < 0 ? 0 : first < at.end ? first : at.end;
    return at;
  }
  __device__ static int64_t offset(const ScoreRow& at, const AttentionStrides& s) {
    return at.outer * s.outer + at.batch * s.batch + at.head * s.head + at.query * s.row;
  }

  // What the mask adds, and a pattern: of a key that they hide -inf.
  __device__ A masked(const ScoreRow& at, int64_t key) const { return Sight::added(at, key, of_mask(at, key)); }
  __device__ A of_mask(const ScoreRow& at, int64_t key) const {
    if (!mask) return A(0);
    const int64_t i = offset(at, mask_at) + key * mask_column;
    switch (mask_dtype) {
      case DType::boolean: return static_cast<const uint8_t*>(mask)[i] ? A(0) : kHidden;
      case DType::f64: return static_cast<A>(load_acc(static_cast<const double*>(mask) + i));
      case DType::bf16: return load_acc(static_cast<const bfloat16*>(mask) + i);
      case DType::f16: return load_acc(static_cast<const float16*>(mask) + i);
      default: return load_acc(static_cast<const float*>(mask) + i);
    }
  }
  __device__ bool sees(const ScoreRow& at, int64_t key) const {
    return key >= at.first && key < at.end && masked(at, key) != kHidden;
  }
  __device__ A distance(const ScoreRow& at, int64_t key) const {
    const int64_t apart = at.own_key - key;
    return static_cast<A>(apart < 0 ? -apart : apart);
  }
  // The score of a key from `first` up to `end` and its product with the query; -inf of one that is hidden. `slope` is that of
  // the softcap, and the scale.
  __device__ A score(const ScoreRow& at, int64_t key, A product, A& slope) const {
    slope = scale;
    const A added = masked(at, key);
    if (added == kHidden) return kHidden;
    A score = product * scale;
    if (softcap != 0) {
      const A capped = static_cast<A>(tanh(score / softcap));
      score = softcap * capped, slope *= 1 - capped * capped;
    }
    if (slopes) score -= load_acc(slopes + at.head * slope_stride) * distance(at, key);
    if (rel_h.data)
      score +=
          load_acc(rel_h.data + offset(at, rel_h.at) + key / width) + load_acc(rel_w.data + offset(at, rel_w.at) + key % width);
    return score + added;
  }
  __device__ A sink(const ScoreRow& at) const { return sinks ? load_acc(sinks + at.head * sink_stride) : kHidden; }

  // What dropout multiplies the weights of a row by.
  struct Kept {
    uint32_t low, high, least;
    A factor;
    bool all;
    __device__ A operator()(int64_t key) const {
      return all ? A(1) : dropout_bits(low, high, static_cast<uint32_t>(key)) >= least ? factor : A(0);
    }
  };
  __device__ Kept kept(const ScoreRow& at) const {
    const uint64_t state = seed ? random_bits(static_cast<uint64_t>(*seed), at.number) : 0;
    return {static_cast<uint32_t>(state), static_cast<uint32_t>(state >> 32), least, factor, !seed};
  }
};

// Whether some keys may be hidden from some queries: those may hold anything.
inline bool hides_some(const AttentionProblem& p) {
  return p.has_mask || p.causal || p.lower_right || p.window_left >= 0 || p.window_right >= 0 ||
         p.parameters.flag(Dense::key_lengths);
}

}  // namespace ai3::inline AI3_LEVEL

// What attention computes, for each batch and head: y = softmax(scale * q k^T + mask) v, the softmax over the keys that a query
// sees. A query that sees none has an output of zeros.
#pragma once
#include "../core/algorithm.h"

namespace ai3 {

struct AttentionOperands {
  Operand query = {}, key = {}, value = {}, mask = {};
  Operand output = {}, logsumexp = {};    // of each query's scaled scores, in the accumulator's type; -inf of none
  Operand dropout_seed = {};              // one number
  Operand own[Parameters::kAtMost] = {};  // tensors among the algorithm's own parameters, at their places, with sizes and strides
  template <class T, class Body>
  AI3_INLINE void plain(const Body& body) const {
    body(query.read<T>(), key.read<T>(), value.read<T>(), mask.read<void>(), output.write<T>());
  }
};
struct AttentionGradients {
  Operand grad_output = {}, query = {}, key = {}, value = {}, mask = {}, output = {}, logsumexp = {};
  Operand dropout_seed = {};                                                  // the forward pass's
  Operand grad_query = {}, grad_key = {}, grad_value = {};                    // contiguous
  Operand own[Parameters::kAtMost] = {}, grad_own[Parameters::kAtMost] = {};  // as in AttentionOperands, and contiguous
};

// How a tensor lies: from one outer batch, batch, head and row to the next. Elements of a row are contiguous but for a mask's.
// 0 where one tensor serves all.
struct AttentionStrides {
  int64_t outer, batch, head, row;
};

// Query (outer, batch, heads, queries, size), key (outer, batch, kv_heads, keys, size) and value (..., keys, value_size): a head
// of key and value serves heads / kv_heads of the query. A size of -1 is unknown.
struct AttentionProblem {
  using Operands = AttentionOperands;
  using Gradients = AttentionGradients;
  DType dtype;
  int32_t threads;
  int64_t outer, batch, heads, kv_heads, queries, keys, size, value_size;
  double scale, dropout;
  bool causal;  // query i sees keys 0 … i, or with lower_right so that the last query sees all of them
  bool has_mask;
  DType mask_dtype;  // boolean: whether a key is seen; else what is added to the score, where -inf hides a key as well
  AttentionStrides query_at, key_at, value_at, output_at, mask_at;
  int64_t mask_column;
  // What `parameters` say of algorithms that have these (AI3_ATTENTION_PARAMETERS): query i's own key is i, with lower_right
  // i + keys - queries; it sees window_left keys before and window_right behind that, all of -1. Scores s become
  // softcap * tanh(s / softcap), where that is not 0, before anything is added.
  int64_t window_left = -1, window_right = -1;
  bool lower_right = false;
  double softcap = 0;
  int64_t rel_width = 0;  // of rel_w; 0: not known, or there is none
  int64_t projected = 0;  // rows that linformer's projections make of the keys; likewise
  Parameters parameters = {};
};
AI3_INLINE bool sizes_known(const AttentionProblem& p) {
  return p.outer >= 0 && p.batch >= 0 && p.heads >= 0 && p.kv_heads >= 0 && p.queries >= 0 && p.keys >= 0 && p.size >= 0 &&
         p.value_size >= 0;
}
#define AI3_ATTENTION_PARAMETERS                                                                                            \
  "int window_left=-1, int window_right=-1, bool causal_lower_right=False, float softcap=0.0, Tensor? sinks=None, Tensor? " \
  "alibi_slopes=None, Tensor? key_lengths=None, Tensor? rel_h=None, Tensor? rel_w=None"
// Their places. Tensors among them: of a batch of key_lengths (outer, batch) keys, so that there are no others; to the score of
// query i and key j are added -alibi_slopes[head] * |own key of i - j|, and rel_h[i][j / width] + rel_w[i][j % width], where keys
// are a grid of (outer, batch, heads, queries, height) and (..., width); sinks[head] is one more logit in a softmax's sum.
struct Dense {
  enum Place { window_left, window_right, causal_lower_right, softcap, sinks, alibi_slopes, key_lengths, rel_h, rel_w };
};
// Without strides: nothing that is prepared depends on them.
AI3_INLINE auto value_of(const AttentionProblem& p) {
  return as_numbers(p.dtype, p.threads, p.outer, p.batch, p.heads, p.kv_heads, p.queries, p.keys, p.size, p.value_size, p.scale,
                    p.dropout, p.causal, p.has_mask, p.mask_dtype, p.rel_width, p.projected, p.parameters);
}

// Of algorithms with AI3_ATTENTION_PARAMETERS. Static: records hold its address, and levels must not share one copy.
AI3_INLINE static bool parameters_fit(const AttentionProblem& p, Reason& reason) {
  const Parameters& own = p.parameters;
  const auto left = static_cast<long long>(own.whole(Dense::window_left)),
             right = static_cast<long long>(own.whole(Dense::window_right));
  const double softcap = own.real(Dense::softcap);
  if (left < -1 || right < -1) return refuse(reason, "needs windows from -1 (open), got %lld and %lld", left, right);
  if (!(softcap >= 0 && softcap < __builtin_inf())) return refuse(reason, "needs softcap from 0, got %g", softcap);
  return own.flag(Dense::rel_h) == own.flag(Dense::rel_w) || refuse(reason, "needs both of rel_h and rel_w, or neither");
}

// Of linformer, and the places of its parameters.
struct Linear {
  enum Place { key_projection, value_projection };
};
AI3_INLINE static bool projections_fit(const AttentionProblem& p, Reason& reason) {
  const Parameters& own = p.parameters;
  if (!own.flag(Linear::key_projection) || !own.flag(Linear::value_projection))
    return refuse(reason, "needs key_projection and value_projection");
  return (!p.causal && !p.has_mask) || refuse(reason, "takes no attn_mask and no is_causal: projected keys have no places");
}

// How an operand of an algorithm's own lies, of so many dimensions after those of batches and heads.
AI3_INLINE int64_t stride_of(const Operand& t, int64_t from_last) {
  const int64_t d = t.rank - 1 - from_last;
  return d < 0 || t.sizes[d] == 1 ? 0 : t.strides[d];
}
AI3_INLINE AttentionStrides strides_of(const Operand& t, int64_t after) {
  return {stride_of(t, after + 2), stride_of(t, after + 1), stride_of(t, after), stride_of(t, after - 1)};
}

// The random numbers of docs/algorithms/attention/bigbird.md.
AI3_INLINE constexpr uint64_t random_bits(uint64_t state, int64_t number) {
  uint64_t x = state + 0x9e3779b97f4a7c15u * (static_cast<uint64_t>(number) + 1);
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}
// What dropout keeps: weights whose 24 bits are no less than dropout_least (docs/attention.md). They depend on the seed and the
// query, of which `low` and `high` are random_bits(seed, query), and on the key.
AI3_INLINE constexpr uint32_t dropout_bits(uint32_t low, uint32_t high, uint32_t key) {
  uint32_t x = low + key * 0x9e3779b9u;
  x = (x ^ x >> 16) * 0x7feb352du ^ high;
  x = (x ^ x >> 15) * 0x846ca68bu;
  return (x ^ x >> 16) >> 8;
}
AI3_INLINE uint32_t dropout_least(double dropout) { return static_cast<uint32_t>(__builtin_ceil(dropout * (1 << 24))); }

namespace problem_of {
using attention = AttentionProblem;
}  // namespace problem_of

}  // namespace ai3

// The definition, row by row: all scores of a query, their softmax, the weighted sum of the values. Keys and values that a query
// does not see are not read.
#include "../core/epilogue.h"
#include "visible.h"

namespace ai3::inline AI3_LEVEL {
namespace {

template <class A>
AI3_INLINE int64_t row_of_scores(const AttentionProblem& p) {
  return round_up(larger(p.keys, 1), Vec<A>::width);
}
template <class A>
AI3_INLINE int64_t row_of_sums(const AttentionProblem& p) {
  return round_up(larger(p.value_size, 1), Vec<A>::width);
}
int64_t math_workspace(const AttentionProblem& p) {
  return with_type(p.dtype, [&]<class T>() {
    using A = Acc<T>;
    const int64_t own = checked_add(checked_mul(2, row_of_scores<A>(p)), row_of_sums<A>(p));
    return workspace_bytes<A>(checked_mul(p.threads, own));
  });
}

template <class T>
AI3_INLINE Acc<T> dot(const T* a, const T* b, int64_t n) {
  using V = Vec<Acc<T>>;
  V sums[2] = {V(Acc<T>(0)), V(Acc<T>(0))};
  int64_t i = 0;
  for (; i + 2 * V::width <= n; i += 2 * V::width) {
    sums[0] = fma(load(a + i), load(b + i), sums[0]);
    sums[1] = fma(load(a + i + V::width), load(b + i + V::width), sums[1]);
  }
  for (; i < n; i += V::width) {
    const int64_t rest = smaller(V::width, n - i);
    sums[0] = fma(load_some(a + i, rest), load_some(b + i, rest), sums[0]);
  }
  const V sum = sums[0] + sums[1];
  Acc<T> total = 0;
  for (int l = 0; l < V::width; l++) total += sum[l];
  return total;
}

template <class T>
void attention_math(const AttentionProblem& whole, const AttentionOperands& m, Workspace& workspace) {
  using A = Acc<T>;
  using V = Vec<A>;
  const int64_t scores_row = row_of_scores<A>(whole), sums_row = row_of_sums<A>(whole), own = 2 * scores_row + sums_row;
  A* const all = workspace.take<A>(whole.threads * own);
  const int64_t rows = whole.outer * whole.batch * whole.heads * whole.queries;
  parallel_for(whole.threads, rows, [&](int64_t n, int thread) {
    A* const scores = all + thread * own;
    A* const added = scores + scores_row;
    A* const sums = added + scores_row;
    const HeadAt at(whole, n / whole.queries);
    const AttentionProblem p = of_head(whole, m.own, at);
    const Positions<T> positions(p, m.own, at);
    const int64_t i = n % p.queries, keys = keys_of(p, i), from = smaller(first_key(p, i), keys);
    const T *const q = m.query.read<T>() + at.of(p.query_at) + i * p.query_at.row,
                   *const k = m.key.read<T>() + at.of_kv(p.key_at), *const v = m.value.read<T>() + at.of_kv(p.value_at);
    const MaskRows<A> mask(p, m.mask, at);
    if (mask)
      mask.read_row(i, 0, keys, added);
    else
      for (int64_t j = 0; j < keys; j++) added[j] = 0;
    for (int64_t j = 0; j < from; j++) added[j] = kHidden<A>;
    A most = kHidden<A>;
    for (int64_t j = 0; j < keys; j++) {
      const bool hidden = added[j] == kHidden<A>;
      A score = hidden ? A(0) : static_cast<A>(p.scale) * dot(q, k + j * p.key_at.row, p.size);
      if (p.softcap != 0) score = static_cast<A>(p.softcap * __builtin_tanh(static_cast<double>(score) / p.softcap));
      if (positions && !hidden) score += positions.added(p, i, j);
      scores[j] = hidden ? kHidden<A> : score + added[j];
      if (scores[j] > most) most = scores[j];
    }
    for (int64_t j = keys; j < scores_row; j++) scores[j] = kHidden<A>;
    const V largest(most == kHidden<A> ? A(0) : most);
    double total = 0;
    for (int64_t j = 0; j < keys; j += V::width) {
      store(scores + j, exp(load(scores + j) - largest));
      for (int64_t l = j; l < smaller(keys, j + V::width); l++) {
        if (added[l] == kHidden<A>) continue;
        total += static_cast<double>(scores[l]);
      }
    }
    if (const Dropout<A> dropout(p, m.dropout_seed); dropout) {
      A* const kept = sums;  // a few at a time
      for (int64_t j = 0; j < keys; j += V::width) {
        dropout.of_row(n, j, V::width, kept);
        store(scores + j, load(scores + j) * load(kept));
      }
    }
    for (int64_t c = 0; c < sums_row; c += V::width) store(sums + c, V(A(0)));
    for (int64_t j = 0; j < keys; j++) {
      if (added[j] == kHidden<A>) continue;
      const T* const row = v + j * p.value_at.row;
      for (int64_t c = 0; c < p.value_size; c += V::width)
        store(sums + c, fma(V(scores[j]), load_some(row + c, smaller(V::width, p.value_size - c)), load(sums + c)));
    }
    const RowEnd<A> end(most, total, sink_of<T>(m.own, at));
    const V share(end.share);
    T* const y = m.output.write<T>() + at.of(p.output_at) + i * p.output_at.row;
    for (int64_t c = 0; c < p.value_size; c += V::width)
      store_some(y + c, load(sums + c) * share, smaller(V::width, p.value_size - c));
    if (m.logsumexp) m.logsumexp.write<A>()[n] = end.logsumexp();
  });
}

GradientNames math_gradients(const AttentionProblem&) { return {"flash", "flash"}; }

AI3_ALGORITHM(attention, math, .accuracy = Accuracy::bounded, .error_bound = 4e-6, .supports = parameters_fit,
              .workspace = math_workspace, .gradients = math_gradients, .parameters = AI3_ATTENTION_PARAMETERS)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

// Attention of few queries for each head, as in decoding.
#pragma once
#include "tiles.h"

namespace ai3::inline AI3_LEVEL {
namespace {

// Decoding: one pass over the keys, which are split into chunks, so that one head can use several threads; all queries of the
// heads that a head of keys serves read each key while it is in the cache. Chunks do not depend on the number of threads.
constexpr int64_t kFew = 4, kChunk = 512;

template <class A>
struct FewRows {
  int64_t group, rows, chunks, heads, query_ld, value_ld, partial;
  AI3_INLINE explicit FewRows(const AttentionProblem& p)
      : group(p.kv_heads > 0 ? p.heads / p.kv_heads : 0),
        rows(checked_mul(group, p.queries)),
        chunks(larger(1, ceil_div(p.keys, kChunk))),
        heads(checked_product({p.outer, p.batch, p.kv_heads})),
        query_ld(padded<A>(p.size)),
        value_ld(padded<A>(p.value_size)),
        partial(checked_mul(rows, checked_add(value_ld, 2))) {}
  AI3_INLINE int64_t partials() const { return checked_mul(checked_mul(heads, chunks), partial); }
  AI3_INLINE int64_t own() const { return cut_size<A>({checked_mul(rows, query_ld), checked_mul(rows, 2 * kChunk)}); }
};

template <class A>
AI3_INLINE A sum_of(Vec<A> v) {
  // Halves are added until one lane is left: a sum lane by lane waits for each addition.
  const auto r = v.raw;
  if constexpr (Vec<A>::width == 16) {
    const auto a = r + __builtin_shufflevector(r, r, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    const auto b = a + __builtin_shufflevector(a, a, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    const auto c = b + __builtin_shufflevector(b, b, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    return c[0] + c[1];
  } else if constexpr (Vec<A>::width == 8) {
    const auto a = r + __builtin_shufflevector(r, r, 4, 5, 6, 7, 0, 1, 2, 3);
    const auto b = a + __builtin_shufflevector(a, a, 2, 3, 0, 1, 6, 7, 4, 5);
    return b[0] + b[1];
  } else if constexpr (Vec<A>::width == 4) {
    const auto a = r + __builtin_shufflevector(r, r, 2, 3, 0, 1);
    return a[0] + a[1];
  } else {
    return r[0] + r[1];
  }
}
// Of N rows each with one row of the accumulator's type, padded. `streamed` rows, which nothing else reads, are taken one after
// the other: the processor prefetches one stream at the memory's bandwidth, and four beside each other at half of it. Others are
// found in the cache, and taken together, which loads `with` once.
template <int N, class T>
AI3_INLINE void dot_rows(const T* rows, int64_t stride, int64_t size, const Acc<T>* with, Acc<T>* to, bool streamed) {
  using V = Vec<Acc<T>>;
  if constexpr (N > 1)
    if (streamed) {
      for (int n = 0; n < N; n++) dot_rows<1>(rows + n * stride, stride, size, with, to + n, true);
      return;
    }
  constexpr int kSums = 4 / N;  // of a row, so that additions need not wait for each other
  V sums[N][kSums];
  for (int n = 0; n < N; n++)
    for (int i = 0; i < kSums; i++) sums[n][i] = V(Acc<T>(0));
  int64_t c = 0;
  for (; c + kSums * V::width <= size; c += kSums * V::width)
#pragma GCC unroll 4
    for (int i = 0; i < kSums; i++) {
      const V w = load(with + c + i * V::width);
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) sums[n][i] = fma(load(rows + n * stride + c + i * V::width), w, sums[n][i]);
    }
  for (; c < size; c += V::width)
    for (int n = 0; n < N; n++)
      sums[n][0] = fma(load_some(rows + n * stride + c, smaller(V::width, size - c)), load(with + c), sums[n][0]);
  for (int n = 0; n < N; n++) {
    V sum = sums[n][0];
    for (int i = 1; i < kSums; i++) sum += sums[n][i];
    to[n] = sum_of(sum);
  }
}
template <int N, class T>
AI3_INLINE void add_rows(const T* rows, int64_t stride, int64_t size, const Acc<T>* weights, Acc<T>* to, bool streamed) {
  using V = Vec<Acc<T>>;
  if constexpr (N > 1)
    if (streamed) {
      for (int n = 0; n < N; n++) add_rows<1>(rows + n * stride, stride, size, weights + n, to, true);
      return;
    }
  V weight[N];
  for (int n = 0; n < N; n++) weight[n] = V(weights[n]);
  int64_t c = 0;
  for (; c + 4 * V::width <= size; c += 4 * V::width)
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      V sum = load(to + c + i * V::width);
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) sum = fma(weight[n], load(rows + n * stride + c + i * V::width), sum);
      store(to + c + i * V::width, sum);
    }
  for (; c < size; c += V::width) {
    V sum = load(to + c);
    for (int n = 0; n < N; n++) sum = fma(weight[n], load_some(rows + n * stride + c, smaller(V::width, size - c)), sum);
    store(to + c, sum);
  }
}
// body.operator()<N>(first) for runs of up to four keys that a row sees; the others are not read.
template <class A, class Body>
AI3_INLINE void over_seen(const A* added, int64_t begin, int64_t end, const Body& body) {
  for (int64_t j = begin; j < end; j += 4) {
    const int64_t count = smaller(4, end - j);
    bool all = count == 4;
    for (int64_t n = 0; n < count; n++) all = all && added[j + n] != kHidden<A>;
    if (all)
      body.template operator()<4>(j);
    else
      for (int64_t n = 0; n < count; n++)
        if (added[j + n] != kHidden<A>) body.template operator()<1>(j + n);
  }
}

template <class T>
void attend_few(const AttentionProblem& whole, const AttentionOperands& m, Workspace& workspace) {
  using A = Acc<T>;
  using V = Vec<A>;
  const FewRows<A> of(whole);
  A* const partials = workspace.take<A>(of.partials());
  A* const all = workspace.take<A>(whole.threads * of.own());
  auto index_of = [&](int64_t head, int64_t row) { return head * of.group + row / whole.queries; };
  parallel_for(whole.threads, of.heads * of.chunks, [&](int64_t n, int thread) {
    Cut<A> cut{all + thread * of.own()};
    A *const queries = cut.take(of.rows * of.query_ld), *const scores = cut.take(of.rows * 2 * kChunk),
             *const added = scores + of.rows * kChunk;
    const int64_t head = n / of.chunks, first = n % of.chunks * kChunk;
    const HeadAt kv(whole, head * of.group);
    const AttentionProblem p = of_head(whole, m.own, kv);
    const int64_t count = larger(0, smaller(kChunk, p.keys - first)), padded_count = round_up(larger(count, 1), V::width);
    bool adds = m.mask || p.softcap != 0;
    const T *const key = m.key.read<T>() + kv.of_kv(p.key_at) + first * p.key_at.row, *const value = m.value.read<T>() +
                                                                                                     kv.of_kv(p.value_at) +
                                                                                                     first * p.value_at.row;
    for (int64_t r = 0; r < of.rows; r++) {
      const HeadAt at(p, index_of(head, r));
      const int64_t i = r % p.queries;
      const T* const query = m.query.read<T>() + at.of(p.query_at) + i * p.query_at.row;
      for (int64_t c = 0; c < p.size; c += V::width)
        store(queries + r * of.query_ld + c, load_some(query + c, smaller(V::width, p.size - c)) * V(static_cast<A>(p.scale)));
      A* const more = added + r * kChunk;
      if (const MaskRows<A> mask(p, m.mask, at); mask)
        mask.read_row(i, first, count, more);
      else
        for (int64_t j = 0; j < count; j++) more[j] = 0;
      const int64_t begin = first_key(p, i) - first, end = keys_of(p, i) - first;
      for (int64_t j = 0; j < count; j++)
        if (j < begin || j >= end) more[j] = kHidden<A>;
      if (const Positions<T> positions(p, m.own, at); positions) {
        adds = true;
        for (int64_t j = 0; j < count; j++)
          if (more[j] != kHidden<A>) more[j] += positions.added(p, i, first + j);
      }
      for (int64_t j = 0; j < padded_count; j++) scores[r * kChunk + j] = kHidden<A>;
    }
    for (int64_t j = 0; j < count; j += 16)
      for (int64_t r = 0; r < of.rows; r++)
        over_seen(added + r * kChunk, j, smaller(count, j + 16), [&]<int N>(int64_t at) {
          dot_rows<N>(key + at * p.key_at.row, p.key_at.row, p.size, queries + r * of.query_ld, scores + r * kChunk + at,
                      of.rows == 1);
        });
    A* const sums = partials + n * of.partial;
    for (int64_t r = 0; r < of.rows; r++) {
      A *const s = scores + r * kChunk, *const more = added + r * kChunk, *const to = sums + r * (of.value_ld + 2);
      V most(kHidden<A>);
      for (int64_t j = 0; j < count; j += V::width) {
        V score = load(s + j);
        if (p.softcap != 0) score = V(static_cast<A>(p.softcap)) * tanh_of(score * V(static_cast<A>(1 / p.softcap)));
        if (adds) {
          if (count - j < V::width)
            for (int64_t l = count; l < j + V::width; l++) more[l] = kHidden<A>;
          const auto add = load(more + j).raw;
          score = add == V(kHidden<A>).raw ? add : score.raw + add;
        }
        store(s + j, score);
        most = at_least(most, score);
      }
      A largest = kHidden<A>;
      for (int l = 0; l < V::width; l++) largest = most[l] > largest || most[l] != most[l] ? most[l] : largest;
      const V shift(largest == kHidden<A> ? A(0) : largest);
      V total(A(0));
      for (int64_t j = 0; j < count; j += V::width) {
        const V e = exp_below(load(s + j) - shift);
        store(s + j, e);
        total += e;
      }
      if (const Dropout<A> dropout(p, m.dropout_seed); dropout) {
        const int64_t row = index_of(head, r) * p.queries + r % p.queries;
        for (int64_t j = 0; j < count; j += V::width) {
          alignas(64) A kept[V::width];
          dropout.of_row(row, first + j, V::width, kept);
          store(s + j, load(s + j) * load(kept));
        }
      }
      for (int64_t c = 0; c < of.value_ld; c += V::width) store(to + c, V(A(0)));
      to[of.value_ld] = largest, to[of.value_ld + 1] = sum_of(total);
    }
    for (int64_t j = 0; j < count; j += 16)
      for (int64_t r = 0; r < of.rows; r++)
        over_seen(added + r * kChunk, j, smaller(count, j + 16), [&]<int N>(int64_t at) {
          add_rows<N>(value + at * p.value_at.row, p.value_at.row, p.value_size, scores + r * kChunk + at,
                      sums + r * (of.value_ld + 2), of.rows == 1);
        });
  });
  // Other threads are asked again only where there is much to join: waking them takes longer than a short cache.
  const AttentionProblem& p = whole;
  const int threads = of.partials() < 1 << 16 ? 1 : p.threads;
  parallel_for(threads, of.heads, [&](int64_t head, int) {
    for (int64_t r = 0; r < of.rows; r++) {
      A* const to = partials + head * of.chunks * of.partial + r * (of.value_ld + 2);
      A largest = kHidden<A>, total = 0;
      for (int64_t c = 0; c < of.chunks; c++) {
        const A most = to[c * of.partial + of.value_ld];
        largest = most > largest || most != most ? most : largest;
      }
      for (int64_t c = 0; c < of.chunks; c++) {
        const A* const from = to + c * of.partial;
        const A most = from[of.value_ld];
        if (most == kHidden<A>) continue;
        const A factor = most == largest ? A(1) : static_cast<A>(__builtin_exp(static_cast<double>(most - largest)));
        total += factor * from[of.value_ld + 1];
        for (int64_t d = 0; d < p.value_size; d += V::width) {
          const V part = load(from + d) * V(factor);
          store(to + d, c == 0 ? part : load(to + d) + part);
        }
      }
      const int64_t index = index_of(head, r), i = r % p.queries;
      const RowEnd<A> end(largest, static_cast<double>(total), sink_of<T>(m.own, HeadAt(p, index)));
      const V share(end.share);
      T* const output = m.output.write<T>() + HeadAt(p, index).of(p.output_at) + i * p.output_at.row;
      for (int64_t d = 0; d < p.value_size; d += V::width)
        store_some(output + d, load(to + d) * share, smaller(V::width, p.value_size - d));
      if (m.logsumexp) m.logsumexp.write<A>()[index * p.queries + i] = end.logsumexp();
    }
  });
}

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

// Gradients of attention in tiles (Dao et al., "FlashAttention", 2022, algorithm 4), in two passes over the scores, each computed
// again from the log-sum-exp: of queries in tiles of queries, of keys and values in tiles of keys, so that both have as many
// independent items as there are tiles, and each sum one order, whatever the number of threads.
#pragma once
#include "tiles.h"

namespace ai3::inline AI3_LEVEL {
namespace {

// Rows of a tile, in panels: more where each tile converts all keys and values for itself.
template <class T>
inline constexpr int64_t kPanels = (sizeof(T) == 2 ? 128 : 64) / kPanel<Acc<T>>;
template <class T>
inline constexpr int64_t kTile = kPanels<T>* kPanel<Acc<T>>;

template <class T>
AI3_INLINE int64_t backward_size(const AttentionProblem& p) {
  using A = Acc<T>;
  constexpr int64_t P = kPanel<A>;
  const int64_t of_rows = checked_add(padded<A>(p.size), padded<A>(p.value_size));
  return cut_size<A>({checked_mul(kTile<T>, p.size), checked_mul(kTile<T>, p.value_size), kKeys * P, kKeys * P,
                      p.has_mask ? kKeys * P : 0, p.softcap != 0 ? kKeys * P : 0, checked_mul(kTile<T>, of_rows),
                      buffer_of<T>(kKeys, p.size, true), buffer_of<T>(kKeys, p.value_size, true), kTile<T>, kTile<T>});
}
template <class T>
AI3_INLINE int64_t query_rows(const AttentionProblem& p) {
  return checked_product({p.outer, p.batch, p.heads, p.queries});
}
int64_t flash_backward_workspace(const AttentionProblem& p, const AttentionGradients&) {
  return with_type(p.dtype, [&]<class T>() {
    return checked_add(workspace_bytes<Acc<T>>(query_rows<T>(p)),
                       workspace_bytes<Acc<T>>(checked_mul(p.threads, backward_size<T>(p))));
  });
}

template <class T>
struct Backward {
  using A = Acc<T>;
  static constexpr int64_t P = kPanel<A>;
  const AttentionProblem& p;
  const AttentionGradients& m;
  A *all, *delta;
  int64_t own;

  // What a thread works in.
  struct Place {
    A *first, *second, *scores, *products, *added, *slopes, *sums, *of_size, *of_value_size, *lanes, *more_lanes;
  };
  Place place(int thread) const {
    Cut<A> cut{all + thread * own};
    A* const first = cut.take(kTile<T> * p.size);
    A* const second = cut.take(kTile<T> * p.value_size);
    A* const scores = cut.take(kKeys * P);
    A* const products = cut.take(kKeys * P);
    A* const added = cut.take(p.has_mask ? kKeys * P : 0);
    A* const slopes = cut.take(p.softcap != 0 ? kKeys * P : 0);
    A* const sums = cut.take(kTile<T> * (padded<A>(p.size) + padded<A>(p.value_size)));
    A* const of_size = cut.take(buffer_of<T>(kKeys, p.size, true));
    A* const of_value_size = cut.take(buffer_of<T>(kKeys, p.value_size, true));
    A* const lanes = cut.take(kTile<T>);
    return {first, second, scores, products, added, slopes, sums, of_size, of_value_size, lanes, cut.take(kTile<T>)};
  }

  // delta[query]: the sum of output times its gradient.
  void sum_outputs() const {
    parallel_ranges(p.threads, query_rows<T>(p), 16, [&](int64_t begin, int64_t end, int) {
      for (int64_t n = begin; n < end; n++) {
        const HeadAt at(p, n / p.queries);
        const int64_t i = n % p.queries;
        const T *const g = m.grad_output.read<T>() + at.of(p.output_at) + i * p.output_at.row, *const y = m.output.read<T>() +
                                                                                                          at.of(p.output_at) +
                                                                                                          i * p.output_at.row;
        Vec<A> sum(A(0));
        for (int64_t c = 0; c < p.value_size; c += Vec<A>::width) {
          const int64_t count = smaller(Vec<A>::width, p.value_size - c);
          sum = fma(load_some(g + c, count), load_some(y + c, count), sum);
        }
        A total = 0;
        for (int l = 0; l < Vec<A>::width; l++) total += sum[l];
        delta[n] = total;
      }
    });
  }

  // A tile of queries passes over the keys.
  void of_queries() const {
    const int64_t tiles = ceil_div(p.queries, kTile<T>), ld = padded<A>(p.size);
    parallel_for(p.threads, p.outer * p.batch * p.heads * tiles, [&](int64_t n, int thread) {
      const Place w = place(thread);
      const HeadAt at(p, n / tiles);
      const int64_t first = n % tiles * kTile<T>, rows = smaller(kTile<T>, p.queries - first), panels = ceil_div(rows, P),
                    row = n / tiles * p.queries + first;
      const T *const query = m.query.read<T>() + at.of(p.query_at) + first * p.query_at.row,
                     *const grad = m.grad_output.read<T>() + at.of(p.output_at) + first * p.output_at.row,
                     *const key = m.key.read<T>() + at.of_kv(p.key_at), *const value = m.value.read<T>() + at.of_kv(p.value_at);
      const MaskRows<A> mask(p, m.mask, at);
      for (int64_t b = 0; b < panels; b++) {
        const int64_t count = smaller(P, rows - b * P);
        pack_rows(query + b * P * p.query_at.row, p.query_at.row, count, p.size, p.scale, w.first + b * P * p.size);
        pack_rows(grad + b * P * p.output_at.row, p.output_at.row, count, p.value_size, 1, w.second + b * P * p.value_size);
      }
      for (int64_t i = 0; i < panels * P; i++) {
        w.lanes[i] = i < rows ? m.logsumexp.read<A>()[row + i] : A(0);
        w.more_lanes[i] = i < rows ? delta[row + i] : A(0);
      }
      for (int64_t i = 0; i < panels * P * ld; i += Vec<A>::width) store(w.sums + i, Vec<A>(A(0)));
      const Range seen{first_key(p, first), keys_of(p, first + rows - 1)};
      for (int64_t j = seen.begin; j < seen.end; j += kKeys) {
        const int64_t most_keys = smaller(kKeys, seen.end - j);
        const RowsAt<A> k = rows_at(key + j * p.key_at.row, p.key_at.row, most_keys, p.size, true, w.of_size),
                        v = rows_at(value + j * p.value_at.row, p.value_at.row, most_keys, p.value_size, true, w.of_value_size);
        int finite = -1;  // not known
        for (int64_t b = 0; b < panels; b++) {
          const int64_t i = first + b * P, queries = smaller(P, p.queries - i),
                        keys = smaller(most_keys, keys_of(p, i + queries - 1) - j);
          if (keys <= 0 || first_key(p, i) >= j + keys) continue;
          const bool diagonal = keys_of(p, i) < j + keys || first_key(p, i + queries - 1) > j;
          if (mask && !reads_any(mask, i, queries, j, keys, w.added)) continue;
          multiply_rows(k, keys, w.first + b * P * p.size, p.size, w.scores);
          if (p.softcap != 0) cap_scores(p.softcap, keys, w.scores, w.slopes);
          if (mask) add_mask(w.added, keys, w.scores);
          if (diagonal) hide_keys(p, i, j, keys, w.scores);
          multiply_rows(v, keys, w.second + b * P * p.value_size, p.value_size, w.products);
          differentiate<A, true>(w.scores, w.products, keys, w.lanes + b * P, w.more_lanes + b * P);
          if (p.softcap != 0) apply_slopes(w.slopes, keys, w.products);
          A* const to = w.sums + b * P * ld;
          if ((mask || diagonal) && finite < 0) finite = all_finite(k, most_keys, p.size);
          if ((mask || diagonal) && !finite)
            add_weighted_seen(queries, w.products, k, keys, p.size, to,
                              [&](int64_t r, int64_t c) { return sees(p, mask, i + r, j + c); });
          else
            add_weighted(queries, w.products, k, keys, p.size, to);
        }
      }
      store_gradient(w.sums, rows, p.size, p.scale, m.grad_query.write<T>() + row * p.size);
    });
  }

  // A tile of keys passes over the queries of all heads that it serves.
  void of_keys_and_values() const {
    const int64_t tiles = ceil_div(p.keys, kTile<T>), ld = padded<A>(p.size), value_ld = padded<A>(p.value_size),
                  group = p.heads / p.kv_heads;
    parallel_for(p.threads, p.outer * p.batch * p.kv_heads * tiles, [&](int64_t n, int thread) {
      const Place w = place(thread);
      const int64_t head = n / tiles, first = n % tiles * kTile<T>, rows = smaller(kTile<T>, p.keys - first),
                    panels = ceil_div(rows, P), row = head * p.keys + first;
      A *const of_keys = w.sums, *const of_values = w.sums + kTile<T> * ld;
      for (int64_t i = 0; i < kTile<T> * (ld + value_ld); i += Vec<A>::width) store(w.sums + i, Vec<A>(A(0)));
      for (int64_t h = 0; h < group; h++) {
        const int64_t index = head * group + h;
        const HeadAt at(p, index);
        const T *const query = m.query.read<T>() + at.of(p.query_at), *const grad = m.grad_output.read<T>() + at.of(p.output_at),
                       *const key = m.key.read<T>() + at.of_kv(p.key_at) + first * p.key_at.row,
                       *const value = m.value.read<T>() + at.of_kv(p.value_at) + first * p.value_at.row;
        const MaskRows<A> mask(p, m.mask, at);
        if (h == 0)
          for (int64_t b = 0; b < panels; b++) {
            const int64_t count = smaller(P, rows - b * P);
            pack_rows(key + b * P * p.key_at.row, p.key_at.row, count, p.size, p.scale, w.first + b * P * p.size);
            pack_rows(value + b * P * p.value_at.row, p.value_at.row, count, p.value_size, 1, w.second + b * P * p.value_size);
          }
        const A *const logsumexp = m.logsumexp.read<A>() + index * p.queries, *const less = delta + index * p.queries;
        const Range seen{queries_of(p, first).begin, queries_of(p, first + rows - 1).end};
        for (int64_t i = seen.begin; i < seen.end; i += kKeys) {
          const int64_t queries = smaller(kKeys, seen.end - i);
          const RowsAt<A> q = rows_at(query + i * p.query_at.row, p.query_at.row, queries, p.size, true, w.of_size),
                          g = rows_at(grad + i * p.output_at.row, p.output_at.row, queries, p.value_size, true, w.of_value_size);
          for (int64_t b = 0; b < panels; b++) {
            const int64_t j = first + b * P, keys = smaller(P, p.keys - j);
            if (i + queries <= queries_of(p, j).begin || i >= queries_of(p, j + keys - 1).end) continue;
            if (mask) {
              if (keys < P)
                for (int64_t s = 0; s < queries * P; s++) w.added[s] = kHidden<A>;
              for (int64_t r = 0; r < queries; r++) mask.read_row(i + r, j, keys, w.added + r * P);
              if (!any_seen(w.added, queries)) continue;
            }
            multiply_rows(q, queries, w.first + b * P * p.size, p.size, w.scores);
            if (p.softcap != 0) cap_scores(p.softcap, queries, w.scores, w.slopes);
            if (mask) add_mask(w.added, queries, w.scores);
            if (hides_some(p)) hide_lanes_of_keys(p, i, queries, j, w.scores);
            multiply_rows(g, queries, w.second + b * P * p.value_size, p.value_size, w.products);
            differentiate<A, false>(w.scores, w.products, queries, logsumexp + i, less + i);
            if (p.softcap != 0) apply_slopes(w.slopes, queries, w.products);
            add_weighted(keys, w.scores, g, queries, p.value_size, of_values + b * P * value_ld);
            add_weighted(keys, w.products, q, queries, p.size, of_keys + b * P * ld);
          }
        }
      }
      if (m.grad_key) store_gradient(of_keys, rows, p.size, p.scale, m.grad_key.write<T>() + row * p.size);
      if (m.grad_value) store_gradient(of_values, rows, p.value_size, 1, m.grad_value.write<T>() + row * p.value_size);
    });
  }
};

void flash_backward(const AttentionProblem& p, const AttentionGradients& m, Workspace& workspace) {
  with_type(p.dtype, [&]<class T>() {
    Acc<T>* const delta = workspace.take<Acc<T>>(query_rows<T>(p));
    const int64_t own = backward_size<T>(p);
    const Backward<T> of{p, m, workspace.take<Acc<T>>(p.threads * own), delta, own};
    of.sum_outputs();
    if (m.grad_query) of.of_queries();
    if (m.grad_key || m.grad_value) of.of_keys_and_values();
  });
}

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

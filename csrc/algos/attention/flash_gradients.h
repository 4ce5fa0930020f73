// Gradients of attention in tiles (Dao et al., "FlashAttention", 2022, algorithm 4): scores are computed again from the
// log-sum-exp, once. A tile of keys passes over all queries that see it, and adds to the queries' gradients; tiles of a head are
// one item for the threads, or several where heads are few. Each item then has sums of its own of the queries' gradients, which
// are added in order: how keys are parted depends on the problem alone, so that every sum has one order, whatever the number of
// threads.
#pragma once
#include "flash_forward.h"

namespace ai3::inline AI3_LEVEL {
namespace {

template <class T>
AI3_INLINE int64_t backward_size(const AttentionProblem& p) {
  using A = Acc<T>;
  constexpr int64_t P = kPanel<A>;
  const int64_t of_rows = checked_add(padded<A>(p.size), padded<A>(p.value_size));
  return cut_size<A>({checked_mul(kTile<T>, p.size), checked_mul(kTile<T>, p.value_size), kKeys * P, kKeys * P,
                      p.has_mask ? kKeys * P : 0, p.softcap != 0 ? kKeys * P : 0, p.dropout > 0 ? kKeys * P : 0,
                      checked_mul(kTile<T>, rel_columns(p)), checked_mul(kTile<T>, rel_columns(p)),
                      checked_mul(kTile<T>, of_rows), buffer_of<T>(kKeys, p.size, true), buffer_of<T>(kKeys, p.value_size, true),
                      buffer_of<T>(kTile<T>, p.size, true), kTile<T>, kTile<T>});
}
template <class T>
AI3_INLINE int64_t query_rows(const AttentionProblem& p) {
  return checked_product({p.outer, p.batch, p.heads, p.queries});
}
// Of which each has a part of its head's slope's gradient.
template <class T>
AI3_INLINE int64_t query_tiles(const AttentionProblem& p) {
  return p.parameters.flag(Dense::alibi_slopes) ? checked_product({p.outer, p.batch, p.heads, ceil_div(p.queries, kTile<T>)}) : 0;
}
// Items of a head: 32 of all heads are enough for threads, 256 keys an item for what it costs to add its sums, and 16 MiB for
// the sums.
template <class T>
AI3_INLINE int64_t parts_of_keys(const AttentionProblem& p) {
  const int64_t heads = larger(1, checked_product({p.outer, p.batch, p.kv_heads})),
                bytes = larger(1, workspace_bytes<Acc<T>>(checked_mul(query_rows<T>(p), padded<Acc<T>>(p.size))));
  return larger(1, smaller(smaller(ceil_div(32, heads), p.keys / 256), (int64_t{16} << 20) / bytes));
}
// Whether sums of the queries' gradients are made where the gradients belong.
template <class T>
AI3_INLINE bool sums_in_place(const AttentionProblem& p) {
  return in_place<T>(p.size, true) && parts_of_keys<T>(p) == 1;
}
template <class T>
AI3_INLINE int64_t query_sums(const AttentionProblem& p) {
  return sums_in_place<T>(p) ? 0 : checked_product({parts_of_keys<T>(p), query_rows<T>(p), padded<Acc<T>>(p.size)});
}
template <class T>
int64_t backward_bytes(const AttentionProblem& p, const AttentionGradients& m) {
  using A = Acc<T>;
  int64_t bytes = workspace_bytes<A>(m.grad_query ? query_sums<T>(p) : 0);
  for (int64_t count : {query_rows<T>(p), query_tiles<T>(p), checked_mul(p.threads, backward_size<T>(p))})
    bytes = checked_add(bytes, workspace_bytes<A>(count));
  return bytes;
}

template <class T>
struct Backward {
  using A = Acc<T>;
  static constexpr int64_t P = kPanel<A>;
  const AttentionProblem& whole;
  const AttentionGradients& m;
  A *all, *delta, *of_slopes, *of_queries;
  int64_t own, columns = rel_columns(whole);

  // What a thread works in.
  struct Place {
    A *first, *second, *scores, *products, *added, *slopes, *kept, *rel, *of_rel, *sums, *of_size, *of_value_size, *keys, *lanes,
        *more_lanes;
  };
  Place place(int thread) const {
    const AttentionProblem& p = whole;
    Cut<A> cut{all + thread * own};
    A* const first = cut.take(kTile<T> * p.size);
    A* const second = cut.take(kTile<T> * p.value_size);
    A* const scores = cut.take(kKeys * P);
    A* const products = cut.take(kKeys * P);
    A* const added = cut.take(p.has_mask ? kKeys * P : 0);
    A* const slopes = cut.take(p.softcap != 0 ? kKeys * P : 0);
    A* const kept = cut.take(p.dropout > 0 ? kKeys * P : 0);
    A* const rel = cut.take(kTile<T> * columns);
    A* const of_rel = cut.take(kTile<T> * columns);
    A* const sums = cut.take(kTile<T> * (padded<A>(p.size) + padded<A>(p.value_size)));
    A* const of_size = cut.take(buffer_of<T>(kKeys, p.size, true));
    A* const of_value_size = cut.take(buffer_of<T>(kKeys, p.value_size, true));
    A* const keys = cut.take(buffer_of<T>(kTile<T>, p.size, true));
    A* const lanes = cut.take(kTile<T>);
    return {first,         second, scores, products,          added, slopes, kept, rel, of_rel, sums, of_size,
            of_value_size, keys,   lanes,  cut.take(kTile<T>)};
  }

  // delta[query]: the sum of output times its gradient.
  void sum_outputs() const {
    const AttentionProblem& p = whole;
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

  // Each sink's: less its weight times delta, of all its queries.
  void of_sinks(T* to) const {
    const AttentionProblem& p = whole;
    parallel_for(p.threads, p.heads, [&](int64_t head, int) {
      double sum = 0;
      for (int64_t b = 0; b < p.outer * p.batch; b++) {
        const int64_t row = (b * p.heads + head) * p.queries;
        const A sink = sink_of<T>(m.own, HeadAt(p, b * p.heads + head));
        for (int64_t i = row; i < row + p.queries; i++)
          if (sink != kHidden<A>)
            sum -= __builtin_exp(static_cast<double>(sink - m.logsumexp.read<A>()[i])) * static_cast<double>(delta[i]);
      }
      to[head] = narrowed<T>(static_cast<A>(sum));
    });
  }
  void sum_slopes(T* to) const {
    const int64_t tiles = ceil_div(whole.queries, kTile<T>);
    for (int64_t head = 0; head < whole.heads; head++) {
      double sum = 0;
      for (int64_t b = 0; b < whole.outer * whole.batch; b++)
        for (int64_t t = 0; t < tiles; t++) sum += static_cast<double>(of_slopes[(b * whole.heads + head) * tiles + t]);
      to[head] = narrowed<T>(static_cast<A>(sum));
    }
  }

  // Gradients of what positions add: a tile of queries passes over the keys.
  void of_positions() const {
    const int64_t tiles = ceil_div(whole.queries, kTile<T>);
    T *const grad_h = m.grad_own[Dense::rel_h].write<T>(), *const grad_w = m.grad_own[Dense::rel_w].write<T>();
    parallel_for(whole.threads, whole.outer * whole.batch * whole.heads * tiles, [&](int64_t n, int thread) {
      const Place w = place(thread);
      const HeadAt at(whole, n / tiles);
      const AttentionProblem p = of_head(whole, m.own, at);
      const Positions<T> positions(p, m.own, at);
      const Dropout<A> dropout(p, m.dropout_seed);
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
        if (positions.rel_h) pack_rel(positions, first + b * P, count, w.rel + b * P * columns);
      }
      for (int64_t i = 0; i < panels * P * columns; i += Vec<A>::width) store(w.of_rel + i, Vec<A>(A(0)));
      double of_slope = 0;
      for (int64_t i = 0; i < panels * P; i++) {
        w.lanes[i] = i < rows ? m.logsumexp.read<A>()[row + i] : A(0);
        w.more_lanes[i] = i < rows ? delta[row + i] : A(0);
      }
      const Range seen{first_key(p, first), keys_of(p, first + rows - 1)};
      for (int64_t j = seen.begin; j < seen.end; j += kKeys) {
        const int64_t most_keys = smaller(kKeys, seen.end - j);
        const RowsAt<A> k = rows_at(key + j * p.key_at.row, p.key_at.row, most_keys, p.size, false, w.of_size),
                        v = rows_at(value + j * p.value_at.row, p.value_at.row, most_keys, p.value_size, false, w.of_value_size);
        for (int64_t b = 0; b < panels; b++) {
          const int64_t i = first + b * P, queries = smaller(P, p.queries - i),
                        keys = smaller(most_keys, keys_of(p, i + queries - 1) - j);
          if (keys <= 0 || first_key(p, i) >= j + keys) continue;
          const bool diagonal = keys_of(p, i) < j + keys || first_key(p, i + queries - 1) > j;
          if (mask && !reads_any(mask, i, queries, j, keys, w.added)) continue;
          multiply_rows(k, keys, w.first + b * P * p.size, p.size, w.scores);
          if (p.softcap != 0) cap_scores(p.softcap, keys, w.scores);
          add_positions(p, positions, w.rel + b * P * columns, i, j, keys, w.scores);
          if (mask) add_mask(w.added, keys, w.scores);
          if (diagonal) hide_keys(p, i, j, keys, w.scores);
          multiply_rows(v, keys, w.second + b * P * p.value_size, p.value_size, w.products);
          if (dropout) {
            dropout.template of_lanes<P>(row + b * P, j, keys, w.kept);
            drop(w.kept, keys, w.products);
          }
          differentiate<A, true>(w.scores, w.products, keys, w.lanes + b * P, w.more_lanes + b * P);
          if (positions.has_slope && of_slopes) of_slope += sum_distances(p, i, queries, j, keys, w.products);
          if (positions.rel_h) sum_rel(positions, j, keys, w.products, w.of_rel + b * P * columns);
        }
      }
      if (of_slopes) of_slopes[n] = static_cast<A>(-of_slope);
      for (int64_t r = 0; r < rows; r++) {
        const A* const from = w.of_rel + r / P * P * columns + r % P;
        if (grad_h)
          for (int64_t c = 0; c < positions.height; c++) grad_h[(row + r) * positions.height + c] = narrowed<T>(from[c * P]);
        if (grad_w)
          for (int64_t c = 0; c < positions.width; c++)
            grad_w[(row + r) * positions.width + c] = narrowed<T>(from[(positions.height + c) * P]);
      }
    });
  }
  // Of gradients of scores, queries in lanes and keys in rows.
  static double sum_distances(const AttentionProblem& p, int64_t query, int64_t queries, int64_t key, int64_t keys,
                              const A* gradients) {
    alignas(64) A sums[P] = {};
    over_distances<A>(own_key(p, query), key, keys, [&](int64_t r, int64_t c, Vec<A> distance) {
      store(sums + c, fma(distance, load(gradients + r * P + c), load(sums + c)));
    });
    double sum = 0;
    for (int64_t l = 0; l < queries; l++) sum += static_cast<double>(sums[l]);
    return sum;
  }
  static void sum_rel(const Positions<T>& of, int64_t key, int64_t keys, const A* gradients, A* to) {
    over_grid(of.width, key, keys, [&](int64_t r, int64_t h, int64_t w) {
      for (int64_t c = 0; c < P; c += Vec<A>::width) {
        const Vec<A> gradient = load(gradients + r * P + c);
        A *const by_h = to + h * P + c, *const by_w = to + (of.height + w) * P + c;
        store(by_h, load(by_h) + gradient), store(by_w, load(by_w) + gradient);
      }
    });
  }

  // Tiles of keys pass over the queries of all heads that they serve.
  void of_tensors() const {
    const int64_t parts = parts_of_keys<T>(whole), tiles = ceil_div(whole.keys, kTile<T>);
    parallel_for(whole.threads, whole.outer * whole.batch * whole.kv_heads * parts, [&](int64_t n, int thread) {
      const Place w = place(thread);
      const int64_t head = n / parts, part = n % parts, group = whole.heads / whole.kv_heads, ld = padded<A>(whole.size),
                    sums = group * whole.queries * ld;
      A* const to = of_queries ? of_queries + part * query_rows<T>(whole) * ld + head * sums : nullptr;
      for (int64_t i = 0; to && i < sums; i += Vec<A>::width) store(to + i, Vec<A>(A(0)));
      const Share own_tiles = share(tiles, parts, part);
      for (int64_t t = own_tiles.begin; t < own_tiles.end; t++) of_tile(w, head, t * kTile<T>, to);
    });
  }
  void of_tile(const Place& w, int64_t head, int64_t first, A* of_head_queries) const {
    const int64_t ld = padded<A>(whole.size), value_ld = padded<A>(whole.value_size), group = whole.heads / whole.kv_heads,
                  rows = smaller(kTile<T>, whole.keys - first), row = head * whole.keys + first;
    const HeadAt kv(whole, head * group);
    const AttentionProblem p = of_head(whole, m.own, kv);
    const T *const key = m.key.read<T>() + kv.of_kv(p.key_at) + first * p.key_at.row, *const value = m.value.read<T>() +
                                                                                                     kv.of_kv(p.value_at) +
                                                                                                     first * p.value_at.row;
    const int64_t seen_rows = larger(0, smaller(rows, p.keys - first)), panels = ceil_div(seen_rows, P);
    for (int64_t b = 0; b < panels; b++) {
      const int64_t count = smaller(P, seen_rows - b * P);
      pack_rows(key + b * P * p.key_at.row, p.key_at.row, count, p.size, p.scale, w.first + b * P * p.size);
      pack_rows(value + b * P * p.value_at.row, p.value_at.row, count, p.value_size, 1, w.second + b * P * p.value_size);
    }
    const RowsAt<A> k = rows_at(key, p.key_at.row, of_head_queries ? seen_rows : 0, p.size, true, w.keys);
    const bool finite = !(m.mask || hides_some(p)) || !of_head_queries || all_finite(k, seen_rows, p.size);
    A *const of_keys = w.sums, *const of_values = w.sums + kTile<T> * ld;
    for (int64_t i = 0; i < kTile<T> * (ld + value_ld); i += Vec<A>::width) store(w.sums + i, Vec<A>(A(0)));
    for (int64_t h = 0; h < group && panels > 0; h++) {
      const int64_t index = head * group + h;
      const HeadAt at(p, index);
      const Positions<T> positions(p, m.own, at);
      const Dropout<A> dropout(p, m.dropout_seed);
      const T *const query = m.query.read<T>() + at.of(p.query_at), *const grad = m.grad_output.read<T>() + at.of(p.output_at);
      const MaskRows<A> mask(p, m.mask, at);
      const A *const logsumexp = m.logsumexp.read<A>() + index * p.queries, *const less = delta + index * p.queries;
      const Range seen{queries_of(p, first).begin, queries_of(p, first + seen_rows - 1).end};
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
          if (positions) add_positions_of_keys(p, positions, i, queries, j, keys, w.scores);
          if (mask) add_mask(w.added, queries, w.scores);
          if (hides_some(p)) hide_lanes_of_keys(p, i, queries, j, w.scores);
          multiply_rows(g, queries, w.second + b * P * p.value_size, p.value_size, w.products);
          if (dropout) {
            for (int64_t r = 0; r < queries; r++) dropout.of_row(index * p.queries + i + r, j, P, w.kept + r * P);
            drop(w.kept, queries, w.products);
          }
          differentiate<A, false>(w.scores, w.products, queries, logsumexp + i, less + i);
          if (dropout) drop(w.kept, queries, w.scores);
          if (p.softcap != 0) apply_slopes(w.slopes, queries, w.products);
          add_weighted(keys, w.scores, g, queries, p.value_size, of_values + b * P * value_ld);
          add_weighted(keys, w.products, q, queries, p.size, of_keys + b * P * ld);
          if (!of_head_queries) continue;
          A* const to = of_head_queries + (h * p.queries + i) * ld;
          const RowsAt<A> of_panel{k.data + b * P * k.stride, k.stride};
          if (finite)
            add_weighted<A, false>(queries, w.products, of_panel, keys, p.size, to);
          else
            add_weighted_seen<A, false>(queries, w.products, of_panel, keys, p.size, to,
                                        [&](int64_t r, int64_t c) { return sees(p, mask, i + r, j + c); });
        }
      }
    }
    if (m.grad_key) store_gradient(of_keys, rows, p.size, p.scale, m.grad_key.write<T>() + row * p.size);
    if (m.grad_value) store_gradient(of_values, rows, p.value_size, 1, m.grad_value.write<T>() + row * p.value_size);
  }
  // What the parts of the keys have for each query, in their order.
  void sum_queries() const {
    const AttentionProblem& p = whole;
    const int64_t parts = parts_of_keys<T>(p), ld = padded<A>(p.size), apart = query_rows<T>(p) * ld;
    T* const to = m.grad_query.write<T>();
    parallel_ranges(p.threads, query_rows<T>(p), 16, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = 1; i < parts; i++)
        for (int64_t c = begin * ld; c < end * ld; c += Vec<A>::width)
          store(of_queries + c, load(of_queries + c) + load(of_queries + i * apart + c));
      store_gradient(of_queries + begin * ld, end - begin, p.size, p.scale, to + begin * p.size);
    });
  }
};

template <class T>
void differentiate_in_tiles(const AttentionProblem& p, const AttentionGradients& m, Workspace& workspace) {
  using A = Acc<T>;
  A* const delta = workspace.take<A>(query_rows<T>(p));
  A* const of_slopes = m.grad_own[Dense::alibi_slopes] ? workspace.take<A>(query_tiles<T>(p)) : nullptr;
  const int64_t own = backward_size<T>(p);
  A* const places = workspace.take<A>(p.threads * own);
  A* const of_queries = !m.grad_query         ? nullptr
                        : sums_in_place<T>(p) ? reinterpret_cast<A*>(m.grad_query.write<T>())
                                              : workspace.take<A>(query_sums<T>(p));
  const Backward<T> of{p, m, places, delta, of_slopes, of_queries, own};
  of.sum_outputs();
  if (const Operand& to = m.grad_own[Dense::sinks]) of.of_sinks(to.write<T>());
  if (of_slopes || m.grad_own[Dense::rel_h] || m.grad_own[Dense::rel_w]) of.of_positions();
  if (of_slopes) of.sum_slopes(m.grad_own[Dense::alibi_slopes].write<T>());
  if (m.grad_query || m.grad_key || m.grad_value) of.of_tensors();
  if (m.grad_query) of.sum_queries();
}

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

// Attention in tiles with an online softmax (Dao et al., "FlashAttention", 2022): a tile of queries passes once over the keys,
// and keeps the largest score so far, the sum of the exponentials and the weighted sum of the values, rescaled where the largest
// one changes. Scores exist for a tile of keys and one panel of queries at a time: memory beside inputs and output is a few
// tiles.
//
// Queries of a panel are the lanes of vectors, from the packed panel on: scores lie [key][query], so that the softmax's maxima
// and sums are taken down the rows without crossing lanes, and are then an operand of the product with the values.
#pragma once
#include "few_queries.h"
#include "tile_products.h"

namespace ai3::inline AI3_LEVEL {
namespace {

// Rows of a tile, in panels: more where each tile converts all keys and values for itself.
template <class T>
inline constexpr int64_t kPanels = (sizeof(T) == 2 ? 128 : 64) / kPanel<Acc<T>>;
template <class T>
inline constexpr int64_t kTile = kPanels<T>* kPanel<Acc<T>>;

// Queries that pass over the keys together: more where keys and values of a head are so many that they come from memory, or a
// cache that cores share, each time (16,384 keys of 64, two Zen 3 cores: 1.0 s instead of 1.1), and tiles enough for many
// threads.
template <class T>
AI3_INLINE int64_t forward_tile(const AttentionProblem& p) {
  constexpr double kMany = 4 << 20;
  constexpr int64_t kLong = 256, kTiles = 64;
  const bool far = static_cast<double>(p.keys) * static_cast<double>(p.size + p.value_size) * sizeof(T) >= kMany;
  return far && p.outer * p.batch * p.heads * ceil_div(p.queries, kLong) >= kTiles ? kLong : kTile<T>;
}

template <class T, class Products>
AI3_INLINE int64_t forward_size(const AttentionProblem& p) {
  using A = Acc<T>;
  constexpr int64_t P = kPanel<A>;
  const int64_t tile = forward_tile<T>(p);
  return checked_add(Products::size(p, tile),
                     cut_size<A>({kKeys * P, p.has_mask ? kKeys * P : 0, checked_mul(tile, rel_columns(p)), tile, tile,
                                  p.dropout > 0 ? kKeys * P : 0}));
}
template <class T>
int64_t forward_bytes(const AttentionProblem& p) {
  using A = Acc<T>;
  if (p.queries > kFew)
    return with_products<T>(
        p, [&]<class Products>() { return workspace_bytes<A>(checked_mul(p.threads, forward_size<T, Products>(p))); });
  const FewRows<A> of(p);
  return checked_add(workspace_bytes<A>(of.partials()), workspace_bytes<A>(checked_mul(p.threads, of.own())));
}

template <class T, class Products>
void attend_by(const AttentionProblem& whole, const AttentionOperands& m, Workspace& workspace) {
  using A = Acc<T>;
  constexpr int64_t P = kPanel<A>;
  const int64_t own = forward_size<T, Products>(whole), tile = forward_tile<T>(whole), tiles = ceil_div(whole.queries, tile),
                columns = rel_columns(whole);
  A* const all = workspace.take<A>(whole.threads * own);
  auto keys_of_tile = [&](const AttentionProblem& p, int64_t n) {
    const int64_t first = n % tiles * tile;
    return Range{first_key(p, first), keys_of(p, smaller(p.queries, first + tile) - 1)};
  };
  parallel_for(
      whole.threads, whole.outer * whole.batch * whole.heads * tiles,
      [&](int64_t n, int thread) {
        const HeadAt at(whole, n / tiles);
        const AttentionProblem p = of_head(whole, m.own, at);
        const Positions<T> positions(p, m.own, at);
        const Dropout<A> dropout(p, m.dropout_seed);
        Cut<A> cut{all + thread * own};
        Products products(p, tile, cut);
        A* const scores = cut.take(kKeys * P);
        A* const added = cut.take(p.has_mask ? kKeys * P : 0);
        A* const rel = cut.take(tile * columns);
        A *const most = cut.take(tile), *const total = cut.take(tile);
        A* const kept = cut.take(p.dropout > 0 ? kKeys * P : 0);
        const int64_t first = n % tiles * tile, rows = smaller(tile, p.queries - first), panels = ceil_div(rows, P);
        const T *const query = m.query.read<T>() + at.of(p.query_at) + first * p.query_at.row,
                       *const key = m.key.read<T>() + at.of_kv(p.key_at), *const value = m.value.read<T>() + at.of_kv(p.value_at);
        const MaskRows<A> mask(p, m.mask, at);
        for (int64_t b = 0; b < panels; b++) {
          const int64_t queries = smaller(P, rows - b * P);
          products.begin(b, {query + b * P * p.query_at.row, p.query_at.row}, queries);
          if (positions.rel_h) pack_rel(positions, first + b * P, queries, rel + b * P * columns);
        }
        for (int64_t i = 0; i < panels * P; i++) most[i] = kHidden<A>, total[i] = 0;
        const Range seen = keys_of_tile(p, n);
        for (int64_t j = seen.begin; j < seen.end; j += kKeys) {
          const int64_t most_keys = smaller(kKeys, seen.end - j);
          products.read({key + j * p.key_at.row, p.key_at.row}, {value + j * p.value_at.row, p.value_at.row}, most_keys);
          int finite = -1;  // not known
          for (int64_t b = 0; b < panels; b++) {
            const int64_t i = first + b * P, queries = smaller(P, p.queries - i),
                          keys = smaller(most_keys, keys_of(p, i + queries - 1) - j);
            if (keys <= 0 || first_key(p, i) >= j + keys) continue;
            const bool diagonal = keys < most_keys || keys_of(p, i) < j + keys || first_key(p, i + queries - 1) > j;
            if (mask && !reads_any(mask, i, queries, j, keys, added)) continue;
            const bool half = queries <= Vec<A>::width;  // a panel, whose other queries hold anything
            products.score(b, {0, keys}, half, scores);
            if (p.softcap != 0) cap_scores(p.softcap, keys, scores);
            if (positions) add_positions(p, positions, rel + b * P * columns, i, j, keys, scores);
            if (mask) add_mask(added, keys, scores);
            if (diagonal) hide_keys(p, i, j, keys, scores);
            alignas(64) A scale[P] = {};
            half ? soften<1>(scores, keys, most + b * P, total + b * P, scale)
                 : soften<2>(scores, keys, most + b * P, total + b * P, scale);
            if (dropout) {
              dropout.template of_lanes<P>(n / tiles * p.queries + i, j, keys, kept);
              drop(kept, keys, scores);
            }
            products.rescale(b, queries, scale);
            if ((mask || diagonal) && finite < 0) finite = products.values_finite(most_keys);
            if ((mask || diagonal) && !finite)
              products.add_seen(b, queries, {0, keys}, scores, [&](int64_t r, int64_t c) { return sees(p, mask, i + r, j + c); });
            else
              products.add(b, queries, {0, keys}, scores);
          }
        }
        T* const output = m.output.write<T>() + at.of(p.output_at) + first * p.output_at.row;
        const A sink = sink_of<T>(m.own, at);
        for (int64_t b = 0; b < panels; b++) {
          const int64_t queries = smaller(P, rows - b * P);
          alignas(64) A share[P] = {};
          for (int64_t r = b * P; r < b * P + queries; r++) {
            const RowEnd<A> end(most[r], static_cast<double>(total[r]), sink);
            share[r - b * P] = end.share;
            if (m.logsumexp) m.logsumexp.write<A>()[n / tiles * p.queries + first + r] = end.logsumexp();
          }
          products.end(b, queries, share, [&](int64_t r) { return output + (b * P + r) * p.output_at.row; });
        }
      },
      [&](int64_t n) {
        const AttentionProblem p = of_head(whole, m.own, HeadAt(whole, n / tiles));
        return static_cast<double>(larger(0, keys_of_tile(p, n).size()));
      });
}
template <class T>
void attend_in_tiles(const AttentionProblem& p, const AttentionOperands& m, Workspace& workspace) {
  if (p.queries <= kFew) return attend_few<T>(p, m, workspace);
  with_products<T>(p, [&]<class Products>() { attend_by<T, Products>(p, m, workspace); });
}

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

// What kernels of attention are made of that compute tiles of scores: queries of a panel are the lanes of vectors, keys the rows
// (docs/decisions/attention.md).
#pragma once
#include "../core/exp.h"
#include "../core/instances.h"
#include "products.h"
#include "visible.h"

namespace ai3::inline AI3_LEVEL {
namespace {

constexpr int64_t kKeys = kRows * (128 / kRows);  // of a tile: slabs of the micro-kernel, all whole

// ---- Rows and panels --------------------------------------------------------------------------------------------------------
// Whether rows are read where they are; `whole`: in vectors, of which the last one may not be a part of one.
template <class T>
AI3_INLINE bool in_place(int64_t size, bool whole) {
  return sizeof(T) == sizeof(Acc<T>) && (!whole || size % Vec<Acc<T>>::width == 0);
}
template <class T>
AI3_INLINE RowsAt<Acc<T>> rows_at(const T* from, int64_t stride, int64_t count, int64_t size, bool whole, Acc<T>* buffer) {
  using A = Acc<T>;
  if constexpr (sizeof(T) == sizeof(A))
    if (in_place<T>(size, whole)) return {from, stride};
  const int64_t ld = padded<A>(size);
  for (int64_t r = 0; r < count; r++)
    for (int64_t c = 0; c < size; c += Vec<A>::width)
      store(buffer + r * ld + c, load_some(from + r * stride + c, smaller(Vec<A>::width, size - c)));
  return {buffer, ld};
}
// Up to kPanel rows as a panel, to[element][row], times `factor`; rows that are missing are 0.
template <class T>
void pack_rows(const T* from, int64_t stride, int64_t count, int64_t size, double factor, Acc<T>* to) {
  using A = Acc<T>;
  constexpr int64_t P = kPanel<A>;
  if (count < P)
    for (int64_t i = 0; i < size * P; i++) to[i] = 0;
  copy_rows(from, int64_t{1}, stride, size, count, to, P);
  if (factor != 1)
    for (int64_t i = 0; i < size * P; i += Vec<A>::width) store(to + i, load(to + i) * Vec<A>(static_cast<A>(factor)));
}
// add_weighted (products.h) where rows that some queries do not see are not finite: those are left out.
template <class A, bool queries_in_lanes = true, class Seen>
void add_weighted_seen(int64_t queries, const A* weights, const RowsAt<A>& rows, int64_t keys, int64_t columns, A* sums,
                       const Seen& seen) {
  constexpr int64_t P = kPanel<A>;
  const int64_t ld = padded<A>(columns);
  for (int64_t q = 0; q < queries; q++)
    for (int64_t j = 0; j < keys; j++) {
      if (!seen(q, j)) continue;
      const A w = queries_in_lanes ? weights[j * P + q] : weights[q * P + j];
      for (int64_t c = 0; c < columns; c++) sums[q * ld + c] += w * rows.data[j * rows.stride + c];
    }
}
template <class A>
AI3_INLINE Vec<A> or_zero(Vec<A> v) {  // -inf as 0
  return v.raw == Vec<A>(kHidden<A>).raw ? typename Vec<A>::Raw{} : v.raw;
}

// ---- Scores -----------------------------------------------------------------------------------------------------------------
// Scores that lie [row][lane]: hidden ones become -inf. `added` lies alike.
template <class A>
AI3_INLINE void add_mask(const A* added, int64_t count, A* scores) {
  for (int64_t i = 0; i < count * kPanel<A>; i += Vec<A>::width) {
    const auto more = load(added + i).raw, sum = load(scores + i).raw + more;
    store(scores + i, Vec<A>(more == Vec<A>(kHidden<A>).raw ? more : sum));
  }
}
template <class A>
AI3_INLINE bool any_seen(const A* added, int64_t count) {
  constexpr int64_t width = Vec<A>::width;
  auto seen = load(added).raw != Vec<A>(kHidden<A>).raw, more = load(added + width).raw != Vec<A>(kHidden<A>).raw;
  for (int64_t i = kPanel<A>; i < count * kPanel<A>; i += kPanel<A>) {
    seen |= load(added + i).raw != Vec<A>(kHidden<A>).raw;
    more |= load(added + i + width).raw != Vec<A>(kHidden<A>).raw;
  }
  seen |= more;
  for (int l = 0; l < width; l++)
    if (seen[l]) return true;
  return false;
}
// What the mask of a tile adds, to[key][query], and whether it lets any of it be seen.
template <class A>
AI3_INLINE bool reads_any(const MaskRows<A>& mask, int64_t query, int64_t queries, int64_t key, int64_t keys, A* to) {
  mask.read_panel(query, queries, key, keys, to);
  return any_seen(to, keys);
}
// Lanes outside of seen(row), counted from the panel's first one, become -inf.
template <class A, class Seen>
AI3_INLINE void hide_lanes(int64_t rows, A* scores, const Seen& seen) {
  constexpr int64_t P = kPanel<A>, width = Vec<A>::width;
  for (int64_t r = 0; r < rows; r++) {
    const Range lanes = seen(r);
    if (lanes.begin <= 0 && lanes.end >= P) continue;
    for (int64_t c = 0; c < P; c += width)
      store(scores + r * P + c, select(part_of(lanes, c, width), load(scores + r * P + c), Vec<A>(kHidden<A>)));
  }
}
// Of queries in lanes and keys in rows, and of keys in lanes and queries in rows.
template <class A>
AI3_INLINE void hide_keys(const AttentionProblem& p, int64_t query, int64_t key, int64_t keys, A* scores) {
  hide_lanes(keys, scores, [&](int64_t r) {
    const Range all = queries_of(p, key + r);
    return Range{all.begin - query, all.end - query};
  });
}
template <class A>
AI3_INLINE void hide_lanes_of_keys(const AttentionProblem& p, int64_t query, int64_t queries, int64_t key, A* scores) {
  hide_lanes(queries, scores, [&](int64_t r) { return Range{first_key(p, query + r) - key, keys_of(p, query + r) - key}; });
}

// tanh: near 0 its series, elsewhere by exp.
template <class A>
AI3_INLINE Vec<A> tanh_of(Vec<A> v) {
  if constexpr (sizeof(A) == 8) {
    for (int l = 0; l < Vec<A>::width; l++) v.raw[l] = __builtin_tanh(v[l]);
    return v;
  } else {
    using Raw = typename Vec<A>::Raw;
    const Vec<A> square = v * v, size(v.raw < Raw{} ? -v.raw : v.raw);
    Vec<A> series(static_cast<A>(62. / 2835));
    for (double c : {-17. / 315, 2. / 15, -1. / 3, 1.}) series = fma(series, square, Vec<A>(static_cast<A>(c)));
    const Raw e = exp_below(Vec<A>(A(-2) * size.raw)).raw, far = (A(1) - e) / (A(1) + e);
    return size.raw < A(0.25) ? (series * v).raw : v.raw < Raw{} ? -far : far;
  }
}
// Scores that lie [row][lane]; `slopes`, where given, get the derivatives.
template <class A>
void cap_scores(double softcap, int64_t count, A* scores, A* slopes = nullptr) {
  const Vec<A> cap(static_cast<A>(softcap)), inverse(static_cast<A>(1 / softcap)), one(A(1));
  for (int64_t i = 0; i < count * kPanel<A>; i += Vec<A>::width) {
    const Vec<A> t = tanh_of(load(scores + i) * inverse);
    store(scores + i, cap * t);
    if (slopes) store(slopes + i, one - t * t);
  }
}
// Of hidden ones the gradient is 0, and the slope may be anything.
template <class A>
AI3_INLINE void apply_slopes(const A* slopes, int64_t count, A* gradients) {
  for (int64_t i = 0; i < count * kPanel<A>; i += Vec<A>::width) {
    const auto g = load(gradients + i).raw;
    store(gradients + i, Vec<A>(g == 0 ? g : g * load(slopes + i).raw));
  }
}

// ---- Positions --------------------------------------------------------------------------------------------------------------
// Numbers of rel_h and rel_w for one query: as many as they say, or at most where their sizes are not known.
AI3_INLINE int64_t rel_columns(const AttentionProblem& p) {
  if (!p.parameters.flag(Dense::rel_w)) return 0;
  return p.rel_width > 0 ? checked_add(p.rel_width, p.keys / p.rel_width) : checked_add(p.keys, 1);
}
// Those of a panel of queries, to[column][query], rel_h's first.
template <class T>
void pack_rel(const Positions<T>& of, int64_t query, int64_t queries, Acc<T>* to) {
  pack_rows(of.rel_h + query * of.rel_h_row, of.rel_h_row, queries, of.height, 1, to);
  pack_rows(of.rel_w + query * of.rel_w_row, of.rel_w_row, queries, of.width, 1, to + of.height * kPanel<Acc<T>>);
}
// body(row, rel_h's column, rel_w's column) of keys in rows.
template <class Body>
AI3_INLINE void over_grid(int64_t width, int64_t key, int64_t keys, const Body& body) {
  int64_t h = key / width, w = key % width;
  for (int64_t r = 0; r < keys; r++) {
    body(r, h, w);
    if (++w == width) w = 0, h++;
  }
}
// body(row, lane, distances) of one vector after the other: lane 0 is at `lane`, row 0 at `row`, on one line.
template <class A, class Body>
AI3_INLINE void over_distances(int64_t lane, int64_t row, int64_t rows, const Body& body) {
  constexpr int64_t P = kPanel<A>, width = Vec<A>::width;
  alignas(64) A at[P];
  for (int64_t l = 0; l < P; l++) at[l] = static_cast<A>(lane + l);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < P; c += width) {
      const typename Vec<A>::Raw apart = load(at + c).raw - Vec<A>(static_cast<A>(row + r)).raw;
      body(r, c, Vec<A>(apart < 0 ? -apart : apart));
    }
}
template <class T>
AI3_INLINE void add_distances(const Positions<T>& of, int64_t lane, int64_t row, int64_t rows, Acc<T>* scores) {
  using A = Acc<T>;
  const Vec<A> slope(-of.slope);
  over_distances<A>(lane, row, rows, [&](int64_t r, int64_t c, Vec<A> distance) {
    A* const to = scores + r * kPanel<A> + c;
    store(to, fma(slope, distance, load(to)));
  });
}
// To scores of queries in lanes and keys in rows; `rel` is what `pack_rel` made of the panel.
template <class T>
void add_positions(const AttentionProblem& p, const Positions<T>& of, const Acc<T>* rel, int64_t query, int64_t key, int64_t keys,
                   Acc<T>* scores) {
  using A = Acc<T>;
  constexpr int64_t P = kPanel<A>, width = Vec<A>::width;
  if (of.has_slope) add_distances(of, own_key(p, query), key, keys, scores);
  if (!of.rel_h) return;
  over_grid(of.width, key, keys, [&](int64_t r, int64_t h, int64_t w) {
    for (int64_t c = 0; c < P; c += width) {
      A* const to = scores + r * P + c;
      store(to, load(to) + load(rel + h * P + c) + load(rel + (of.height + w) * P + c));
    }
  });
}
// To scores of keys in lanes and queries in rows.
template <class T>
void add_positions_of_keys(const AttentionProblem& p, const Positions<T>& of, int64_t query, int64_t queries, int64_t key,
                           int64_t keys, Acc<T>* scores) {
  if (of.has_slope) add_distances(of, key, own_key(p, query), queries, scores);
  if (!of.rel_h) return;
  for (int64_t r = 0; r < queries; r++) {
    const T *const by_h = of.rel_h + (query + r) * of.rel_h_row, *const by_w = of.rel_w + (query + r) * of.rel_w_row;
    over_grid(of.width, key, keys,
              [&](int64_t l, int64_t h, int64_t w) { scores[r * kPanel<Acc<T>> + l] += widen(by_h[h]) + widen(by_w[w]); });
  }
}

// What a thread has for itself, in elements; parts are cut off in order.
template <class A>
struct Cut {
  A* next;
  AI3_INLINE A* take(int64_t count) {
    A* const part = next;
    next += round_up(count, 64 / static_cast<int64_t>(sizeof(A)));
    return part;
  }
};
template <class A>
AI3_INLINE int64_t cut_size(std::initializer_list<int64_t> counts) {
  int64_t sum = 0;
  for (const int64_t* c = counts.begin(); c != counts.end(); c++)
    sum = checked_add(sum, round_up(*c, 64 / static_cast<int64_t>(sizeof(A))));
  return sum;
}
// Elements of a buffer for rows that are not read in place.
template <class T>
AI3_INLINE int64_t buffer_of(int64_t rows, int64_t size, bool whole) {
  return in_place<T>(size, whole) ? 0 : checked_mul(rows, padded<Acc<T>>(size));
}

// ---- Softmax ----------------------------------------------------------------------------------------------------------------
// The softmax of one more tile of scores, [key][query of a panel]: they become exp(score - most), of the largest score so far,
// and the sums so far are those of that one, as are the weighted sums of values after they are multiplied by `scale`. Of the
// first `vectors` of a panel: queries of the others are not looked at.
template <int vectors, class A>
AI3_INLINE void soften(A* scores, int64_t keys, A* most, A* total, A* scale) {
  constexpr int64_t P = kPanel<A>, width = Vec<A>::width;
  using V = Vec<A>;
  V largest[2][vectors];
  for (int i = 0; i < vectors; i++) largest[0][i] = load(most + i * width), largest[1][i] = V(kHidden<A>);
  int64_t j = 0;
  for (; j + 2 <= keys; j += 2)
#pragma GCC unroll 4
    for (int i = 0; i < 2 * vectors; i++) {
      V& so_far = largest[i / vectors][i % vectors];
      so_far = at_least(so_far, load(scores + (j + i / vectors) * P + i % vectors * width));
    }
  if (j < keys)
    for (int i = 0; i < vectors; i++) largest[0][i] = at_least(largest[0][i], load(scores + j * P + i * width));
  V shift[vectors], so_far[vectors], sums[vectors];  // of this tile apart: fewer additions round at the size of the whole
  for (int i = 0; i < vectors; i++) {
    const V now = at_least(largest[0][i], largest[1][i]);
    shift[i] = or_zero(now), sums[i] = V(A(0));
    const V factor = exp_below(load(most + i * width) - shift[i]);
    store(most + i * width, now), store(scale + i * width, factor);
    so_far[i] = load(total + i * width) * factor;
  }
  for (j = 0; j < keys; j++)
#pragma GCC unroll 2
    for (int i = 0; i < vectors; i++) {
      const V e = exp_below(load(scores + j * P + i * width) - shift[i]);
      store(scores + j * P + i * width, e);
      sums[i] += e;
    }
  for (int i = 0; i < vectors; i++) store(total + i * width, so_far[i] + sums[i]);
}
template <class A>
AI3_INLINE void scale_rows(A* sums, int64_t rows, int64_t columns, const A* scale) {
  const int64_t ld = padded<A>(columns);
  for (int64_t r = 0; r < rows; r++) {
    if (scale[r] == A(1)) continue;
    for (int64_t c = 0; c < ld; c += Vec<A>::width) store(sums + r * ld + c, load(sums + r * ld + c) * Vec<A>(scale[r]));
  }
}

template <class A>
AI3_INLINE void drop(const A* kept, int64_t count, A* weights) {
  for (int64_t i = 0; i < count * kPanel<A>; i += Vec<A>::width) store(weights + i, load(weights + i) * load(kept + i));
}

// ---- Gradients --------------------------------------------------------------------------------------------------------------
// Scores, and dO v^T in `products`, [row][lane], become weights exp(score - logsumexp) and the scores' gradients, weight *
// (product - delta); 0 where a key is hidden. Of a row or of a lane each, as the queries lie.
template <class A, bool queries_in_lanes>
AI3_INLINE void differentiate(A* scores, A* products, int64_t rows, const A* logsumexp, const A* delta) {
  constexpr int64_t P = kPanel<A>, width = Vec<A>::width;
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < P; c += width) {
      const Vec<A> score = load(scores + r * P + c), of_query = queries_in_lanes ? load(logsumexp + c) : Vec<A>(logsumexp[r]),
                   less = queries_in_lanes ? load(delta + c) : Vec<A>(delta[r]);
      const Vec<A> weight = exp_below(score - or_zero(of_query)), gradient = weight * (load(products + r * P + c) - less);
      const auto hidden = score.raw == Vec<A>(kHidden<A>).raw;
      const typename Vec<A>::Raw none{};
      store(scores + r * P + c, Vec<A>(hidden ? none : weight.raw));
      store(products + r * P + c, Vec<A>(hidden ? none : gradient.raw));
    }
}
// A head's gradient is contiguous rows.
template <class T>
AI3_INLINE void store_gradient(const Acc<T>* sums, int64_t rows, int64_t size, double factor, T* to) {
  using A = Acc<T>;
  const int64_t ld = padded<A>(size);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < size; c += Vec<A>::width)
      store_some(to + r * size + c, load(sums + r * ld + c) * Vec<A>(static_cast<A>(factor)), smaller(Vec<A>::width, size - c));
}

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

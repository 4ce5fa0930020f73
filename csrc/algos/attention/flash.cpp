// Attention in tiles with an online softmax (Dao et al., "FlashAttention", 2022): a tile of queries passes once over the keys,
// and keeps the largest score so far, the sum of the exponentials and the weighted sum of the values, rescaled where the largest
// one changes. Scores exist for a tile of keys and one panel of queries at a time: memory beside inputs and output is a few
// tiles.
//
// Queries of a panel are the lanes of vectors, from the packed panel on: scores lie [key][query], so that the softmax's maxima
// and sums are taken down the rows without crossing lanes, and are then read as the left operand of the product with the values.
// Keys and values are read in place, as rows: neither is packed where they are of the accumulator's type.
//
// Gradients (ibid., algorithm 4) in two passes over the scores, each computed again from the log-sum-exp: of queries in tiles of
// queries, of keys and values in tiles of keys, so that both have as many independent items as there are tiles, and each sum one
// order, whatever the number of threads.
#include "../core/gemm.h"
#include "visible.h"

namespace ai3::inline AI3_LEVEL {
namespace {

constexpr int64_t kKeys = kRows * (128 / kRows);  // of a tile: slabs of the micro-kernel, all whole

// 2^v of v <= 0, or a little more; 0 where that is no normal number. v = n + r, |r| <= 1/2: a polynomial of r, within 1.2e-7,
// times 2^n, whose bits are those of the sum by which v was rounded.
AI3_INLINE Vec<float> exp2_below(Vec<float> v) {
  using Raw = Vec<float>::Raw;
  const Vec<float> x = at_least(Vec<float>(-127.f), v);
  const Raw magic = Vec<float>(12582912.f + 127.f).raw, z = x.raw + magic;
  const Vec<float> r = x.raw - (z - magic);
  Vec<float> e = 0.0013264727f;
  for (float c : {0.0096715126f, 0.05550734f, 0.24022242f, 0.69314698f, 1.f}) e = fma(e, r, Vec<float>(c));
  return e * Vec<float>(detail::bit_cast<Raw>(detail::bit_cast<detail::Words>(z) << 23));
}
AI3_INLINE Vec<double> exp2_below(Vec<double> v) {
  using Raw = Vec<double>::Raw;
  typedef uint64_t Longs __attribute__((vector_size(AI3_VECTOR_BYTES)));
  const Vec<double> x = at_least(Vec<double>(-1023.), v);
  const Raw magic = Vec<double>(6755399441055744. + 1023.).raw, z = x.raw + magic;
  const Vec<double> r = Vec<double>(0.69314718055994531) * Vec<double>(x.raw - (z - magic));
  Vec<double> e = 1. / 6227020800;  // the exponential series
  for (double c : {1. / 479001600, 1. / 39916800, 1. / 3628800, 1. / 362880, 1. / 40320, 1. / 5040, 1. / 720, 1. / 120, 1. / 24,
                   1. / 6, .5, 1., 1.})
    e = fma(e, r, Vec<double>(c));
  return e * Vec<double>(detail::bit_cast<Raw>(detail::bit_cast<Longs>(z) << 52));
}
template <class A>
AI3_INLINE Vec<A> exp_below(Vec<A> v) {
  return exp2_below(v * Vec<A>(static_cast<A>(1.4426950408889634)));
}

// ---- Rows and panels --------------------------------------------------------------------------------------------------------
template <class A>
AI3_INLINE int64_t padded(int64_t elements) {
  return round_up(elements, Vec<A>::width);
}
// Rows of the accumulator's type.
template <class A>
struct RowsAt {
  const A* data;
  int64_t stride;
};
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
template <class A>
bool all_finite(const RowsAt<A>& rows, int64_t count, int64_t size) {
  using Raw = typename Vec<A>::Raw;
  Raw sum{};
  A rest = 0;
  for (int64_t r = 0; r < count; r++) {
    const A* row = rows.data + r * rows.stride;
    int64_t c = 0;
    for (; c + Vec<A>::width <= size; c += Vec<A>::width) sum += load(row + c).raw * Raw{};
    for (; c < size; c++) rest += row[c] * A(0);
  }
  for (int l = 0; l < Vec<A>::width; l++) rest += sum[l];
  return rest == 0;
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
// to[row][column of the panel] = rows * panel.
template <class A>
void multiply_rows(const RowsAt<A>& rows, int64_t count, const A* panel, int64_t size, A* to) {
  constexpr int64_t P = kPanel<A>;
  alignas(64) const A zeros[P] = {};
  for (int64_t r = 0; r < count; r += kRows) {
    const int64_t n = smaller(kRows, count - r);
    const char* const next = reinterpret_cast<const char*>(rows.data + smaller(r + kRows, count - 1) * rows.stride);
    multiply_tile<A, true>(n, StridedRows<A>{rows.data + r * rows.stride, rows.stride}, panel, size,
                           Tile<A>{zeros, 0, to + r * P, P, next, 0, {next, kRows * static_cast<int64_t>(sizeof(A))}});
  }
}
// sums[query] += weights[key][query] * rows[key], for R queries and two vectors of columns, or one.
template <class A, bool half, int R = kRows>
AI3_INLINE void add_weighted_tile(int64_t queries, const A* weights, const RowsAt<A>& rows, int64_t keys, A* sums, int64_t ld) {
  if constexpr (R > 1)
    if (queries < R) return add_weighted_tile<A, half, R - 1>(queries, weights, rows, keys, sums, ld);
  MicroTile<A, R, half> tile;
  tile.start(sums, ld);
  const A* row = rows.data;
  for (int64_t j = 0; j < keys; j++, weights += kPanel<A>, row += rows.stride) {
    const Vec<A> left = load(row), right = half ? left : load(row + Vec<A>::width);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      const Vec<A> w = weights[r];
      tile.left[r] = fma(w, left, tile.left[r]);
      if constexpr (!half) tile.right[r] = fma(w, right, tile.right[r]);
    }
  }
  tile.store(sums, ld);
}
template <class A>
void add_weighted(int64_t queries, const A* weights, const RowsAt<A>& rows, int64_t keys, int64_t columns, A* sums) {
  constexpr int64_t P = kPanel<A>, width = Vec<A>::width;
  const int64_t ld = padded<A>(columns), slabs = ceil_div(queries, kRows);
  for (int64_t c = 0; c < columns; c += P)
    for (int64_t s = 0; s < slabs; s++) {
      const Share q = share(queries, slabs, s);
      const RowsAt<A> from{rows.data + c, rows.stride};
      if (columns - c <= width)
        add_weighted_tile<A, true>(q.size(), weights + q.begin, from, keys, sums + q.begin * ld + c, ld);
      else
        add_weighted_tile<A, false>(q.size(), weights + q.begin, from, keys, sums + q.begin * ld + c, ld);
    }
}
// The same where rows that some queries do not see are not finite: those are left out.
template <class A, class Seen>
void add_weighted_seen(int64_t queries, const A* weights, const RowsAt<A>& rows, int64_t keys, int64_t columns, A* sums,
                       const Seen& seen) {
  const int64_t ld = padded<A>(columns);
  for (int64_t q = 0; q < queries; q++)
    for (int64_t j = 0; j < keys; j++) {
      if (!seen(q, j)) continue;
      const A w = weights[j * kPanel<A> + q];
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
  auto seen = load(added).raw != Vec<A>(kHidden<A>).raw;
  for (int64_t i = Vec<A>::width; i < count * kPanel<A>; i += Vec<A>::width)
    seen |= load(added + i).raw != Vec<A>(kHidden<A>).raw;
  for (int l = 0; l < Vec<A>::width; l++)
    if (seen[l]) return true;
  return false;
}
// What the mask of a tile adds, to[key][query], hiding the lanes behind the last query; whether it lets any of it be seen.
template <class A>
AI3_INLINE bool reads_any(const MaskRows<A>& mask, int64_t query, int64_t queries, int64_t key, int64_t keys, A* to) {
  if (queries < kPanel<A>)
    for (int64_t s = 0; s < keys * kPanel<A>; s++) to[s] = kHidden<A>;
  mask.read_tile(query, queries, key, keys, to, kPanel<A>);
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

// ---- Forward ----------------------------------------------------------------------------------------------------------------
// Rows of a tile, in panels: more where each tile converts all keys and values for itself.
template <class T>
inline constexpr int64_t kPanels = (sizeof(T) == 2 ? 128 : 64) / kPanel<Acc<T>>;
template <class T>
inline constexpr int64_t kTile = kPanels<T>* kPanel<Acc<T>>;

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
// ---- Few queries
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
// Of N rows each with one row of the accumulator's type, padded.
template <int N, class T>
AI3_INLINE void dot_rows(const T* rows, int64_t stride, int64_t size, const Acc<T>* with, Acc<T>* to) {
  using V = Vec<Acc<T>>;
  V sums[N];
  for (int n = 0; n < N; n++) sums[n] = V(Acc<T>(0));
  int64_t c = 0;
  for (; c + V::width <= size; c += V::width) {
    const V w = load(with + c);
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) sums[n] = fma(load(rows + n * stride + c), w, sums[n]);
  }
  if (c < size)
    for (int n = 0; n < N; n++) sums[n] = fma(load_some(rows + n * stride + c, size - c), load(with + c), sums[n]);
  for (int n = 0; n < N; n++) to[n] = sum_of(sums[n]);
}
template <int N, class T>
AI3_INLINE void add_rows(const T* rows, int64_t stride, int64_t size, const Acc<T>* weights, Acc<T>* to) {
  using V = Vec<Acc<T>>;
  for (int64_t c = 0; c < size; c += V::width) {
    const int64_t count = smaller(V::width, size - c);
    V sum = load(to + c);
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) sum = fma(V(weights[n]), load_some(rows + n * stride + c, count), sum);
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
void attend_few(const AttentionProblem& p, const AttentionOperands& m, Workspace& workspace) {
  using A = Acc<T>;
  using V = Vec<A>;
  const FewRows<A> of(p);
  A* const partials = workspace.take<A>(of.partials());
  A* const all = workspace.take<A>(p.threads * of.own());
  auto index_of = [&](int64_t head, int64_t row) { return head * of.group + row / p.queries; };
  parallel_for(p.threads, of.heads * of.chunks, [&](int64_t n, int thread) {
    Cut<A> cut{all + thread * of.own()};
    A *const queries = cut.take(of.rows * of.query_ld), *const scores = cut.take(of.rows * 2 * kChunk),
             *const added = scores + of.rows * kChunk;
    const int64_t head = n / of.chunks, first = n % of.chunks * kChunk, count = smaller(kChunk, p.keys - first),
                  padded_count = round_up(larger(count, 1), V::width);
    const HeadAt kv(p, head * of.group);
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
      for (int64_t j = 0; j < padded_count; j++) scores[r * kChunk + j] = kHidden<A>;
    }
    for (int64_t j = 0; j < count; j += 16)
      for (int64_t r = 0; r < of.rows; r++)
        over_seen(added + r * kChunk, j, smaller(count, j + 16), [&]<int N>(int64_t at) {
          dot_rows<N>(key + at * p.key_at.row, p.key_at.row, p.size, queries + r * of.query_ld, scores + r * kChunk + at);
        });
    A* const sums = partials + n * of.partial;
    for (int64_t r = 0; r < of.rows; r++) {
      A *const s = scores + r * kChunk, *const more = added + r * kChunk, *const to = sums + r * (of.value_ld + 2);
      V most(kHidden<A>);
      for (int64_t j = 0; j < count; j += V::width) {
        V score = load(s + j);
        if (p.softcap != 0) score = V(static_cast<A>(p.softcap)) * tanh_of(score * V(static_cast<A>(1 / p.softcap)));
        if (m.mask || p.softcap != 0) {
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
      for (int64_t c = 0; c < of.value_ld; c += V::width) store(to + c, V(A(0)));
      to[of.value_ld] = largest, to[of.value_ld + 1] = sum_of(total);
    }
    for (int64_t j = 0; j < count; j += 16)
      for (int64_t r = 0; r < of.rows; r++)
        over_seen(added + r * kChunk, j, smaller(count, j + 16), [&]<int N>(int64_t at) {
          add_rows<N>(value + at * p.value_at.row, p.value_at.row, p.value_size, scores + r * kChunk + at,
                      sums + r * (of.value_ld + 2));
        });
  });
  // Other threads are asked again only where there is much to join: waking them takes longer than a short cache.
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
      const V share(total == 0 ? A(0) : 1 / total);
      T* const output = m.output.write<T>() + HeadAt(p, index).of(p.output_at) + i * p.output_at.row;
      for (int64_t d = 0; d < p.value_size; d += V::width)
        store_some(output + d, load(to + d) * share, smaller(V::width, p.value_size - d));
      if (m.logsumexp)
        m.logsumexp.write<A>()[index * p.queries + i] =
            total == 0 ? kHidden<A> : largest + static_cast<A>(__builtin_log(static_cast<double>(total)));
    }
  });
}

template <class T>
AI3_INLINE int64_t forward_size(const AttentionProblem& p) {
  using A = Acc<T>;
  constexpr int64_t P = kPanel<A>;
  return cut_size<A>({checked_mul(kTile<T>, p.size), kKeys * P, p.has_mask ? kKeys * P : 0,
                      checked_mul(kTile<T>, padded<A>(p.value_size)), kTile<T>, kTile<T>, buffer_of<T>(kKeys, p.size, false),
                      buffer_of<T>(kKeys, p.value_size, true)});
}
int64_t flash_workspace(const AttentionProblem& p) {
  if (p.queries <= kFew)
    return with_type(p.dtype, [&]<class T>() {
      const FewRows<Acc<T>> of(p);
      return checked_add(workspace_bytes<Acc<T>>(of.partials()), workspace_bytes<Acc<T>>(checked_mul(p.threads, of.own())));
    });
  return with_type(p.dtype, [&]<class T>() { return workspace_bytes<Acc<T>>(checked_mul(p.threads, forward_size<T>(p))); });
}

// The softmax of one more tile of scores, [key][query of a panel]: they become exp(score - most), of the largest score so far,
// and the sums so far are those of that one, as are the weighted sums of values after they are multiplied by `scale`.
template <class A>
AI3_INLINE void soften(A* scores, int64_t keys, A* most, A* total, A* scale) {
  constexpr int64_t P = kPanel<A>, width = Vec<A>::width;
  using V = Vec<A>;
  V largest[2][2] = {{load(most), load(most + width)}, {V(kHidden<A>), V(kHidden<A>)}};
  int64_t j = 0;
  for (; j + 2 <= keys; j += 2)
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) largest[i / 2][i % 2] = at_least(largest[i / 2][i % 2], load(scores + j * P + i * width));
  if (j < keys)
    for (int i = 0; i < 2; i++) largest[0][i] = at_least(largest[0][i], load(scores + j * P + i * width));
  V shift[2], sums[2];
  for (int i = 0; i < 2; i++) {
    const V now = at_least(largest[0][i], largest[1][i]);
    shift[i] = or_zero(now);
    const V factor = exp_below(load(most + i * width) - shift[i]);
    store(most + i * width, now), store(scale + i * width, factor);
    sums[i] = load(total + i * width) * factor;
  }
  for (j = 0; j < keys; j++)
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      const V e = exp_below(load(scores + j * P + i * width) - shift[i]);
      store(scores + j * P + i * width, e);
      sums[i] += e;
    }
  for (int i = 0; i < 2; i++) store(total + i * width, sums[i]);
}
template <class A>
AI3_INLINE void scale_rows(A* sums, int64_t rows, int64_t columns, const A* scale) {
  const int64_t ld = padded<A>(columns);
  for (int64_t r = 0; r < rows; r++) {
    if (scale[r] == A(1)) continue;
    for (int64_t c = 0; c < ld; c += Vec<A>::width) store(sums + r * ld + c, load(sums + r * ld + c) * Vec<A>(scale[r]));
  }
}

template <class T>
void attention_flash(const AttentionProblem& p, const AttentionOperands& m, Workspace& workspace) {
  using A = Acc<T>;
  constexpr int64_t P = kPanel<A>;
  if (p.queries <= kFew) return attend_few<T>(p, m, workspace);
  const int64_t own = forward_size<T>(p), tiles = ceil_div(p.queries, kTile<T>), ld = padded<A>(p.value_size);
  A* const all = workspace.take<A>(p.threads * own);
  auto keys_of_tile = [&](int64_t n) {
    const int64_t first = n % tiles * kTile<T>;
    return Range{first_key(p, first), keys_of(p, smaller(p.queries, first + kTile<T>) - 1)};
  };
  parallel_for(
      p.threads, p.outer * p.batch * p.heads * tiles,
      [&](int64_t n, int thread) {
        Cut<A> cut{all + thread * own};
        A* const packed = cut.take(kTile<T> * p.size);
        A* const scores = cut.take(kKeys * P);
        A* const added = cut.take(p.has_mask ? kKeys * P : 0);
        A* const sums = cut.take(kTile<T> * ld);
        A *const most = cut.take(kTile<T>), *const total = cut.take(kTile<T>);
        A* const of_keys = cut.take(buffer_of<T>(kKeys, p.size, false));
        A* const of_values = cut.take(buffer_of<T>(kKeys, p.value_size, true));
        const HeadAt at(p, n / tiles);
        const int64_t first = n % tiles * kTile<T>, rows = smaller(kTile<T>, p.queries - first), panels = ceil_div(rows, P);
        const T *const query = m.query.read<T>() + at.of(p.query_at) + first * p.query_at.row,
                       *const key = m.key.read<T>() + at.of_kv(p.key_at), *const value = m.value.read<T>() + at.of_kv(p.value_at);
        const MaskRows<A> mask(p, m.mask, at);
        for (int64_t b = 0; b < panels; b++)
          pack_rows(query + b * P * p.query_at.row, p.query_at.row, smaller(P, rows - b * P), p.size, p.scale,
                    packed + b * P * p.size);
        for (int64_t i = 0; i < panels * P * ld; i += Vec<A>::width) store(sums + i, Vec<A>(A(0)));
        for (int64_t i = 0; i < panels * P; i++) most[i] = kHidden<A>, total[i] = 0;
        const Range seen = keys_of_tile(n);
        for (int64_t j = seen.begin; j < seen.end; j += kKeys) {
          const int64_t most_keys = smaller(kKeys, seen.end - j);
          const RowsAt<A> k = rows_at(key + j * p.key_at.row, p.key_at.row, most_keys, p.size, false, of_keys),
                          v = rows_at(value + j * p.value_at.row, p.value_at.row, most_keys, p.value_size, true, of_values);
          int finite = -1;  // not known
          for (int64_t b = 0; b < panels; b++) {
            const int64_t i = first + b * P, queries = smaller(P, p.queries - i),
                          keys = smaller(most_keys, keys_of(p, i + queries - 1) - j);
            if (keys <= 0 || first_key(p, i) >= j + keys) continue;
            const bool diagonal = keys_of(p, i) < j + keys || first_key(p, i + queries - 1) > j;
            if (mask && !reads_any(mask, i, queries, j, keys, added)) continue;
            multiply_rows(k, keys, packed + b * P * p.size, p.size, scores);
            if (p.softcap != 0) cap_scores(p.softcap, keys, scores);
            if (mask) add_mask(added, keys, scores);
            if (diagonal) hide_keys(p, i, j, keys, scores);
            alignas(64) A scale[P];
            soften(scores, keys, most + b * P, total + b * P, scale);
            A* const to = sums + b * P * ld;
            scale_rows(to, queries, p.value_size, scale);
            if ((mask || diagonal) && finite < 0) finite = all_finite(v, most_keys, p.value_size);
            if ((mask || diagonal) && !finite)
              add_weighted_seen(queries, scores, v, keys, p.value_size, to,
                                [&](int64_t r, int64_t c) { return sees(p, mask, i + r, j + c); });
            else
              add_weighted(queries, scores, v, keys, p.value_size, to);
          }
        }
        T* const output = m.output.write<T>() + at.of(p.output_at) + first * p.output_at.row;
        for (int64_t r = 0; r < rows; r++) {
          const Vec<A> share(total[r] == 0 ? A(0) : 1 / total[r]);
          for (int64_t c = 0; c < p.value_size; c += Vec<A>::width)
            store_some(output + r * p.output_at.row + c, load(sums + r * ld + c) * share,
                       smaller(Vec<A>::width, p.value_size - c));
        }
        if (m.logsumexp)
          for (int64_t r = 0; r < rows; r++)
            m.logsumexp.write<A>()[n / tiles * p.queries + first + r] =
                total[r] == 0 ? kHidden<A> : most[r] + static_cast<A>(__builtin_log(static_cast<double>(total[r])));
      },
      [&](int64_t n) { return static_cast<double>(larger(0, keys_of_tile(n).size())); });
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
// A head's gradient is contiguous rows.
template <class T>
AI3_INLINE void store_gradient(const Acc<T>* sums, int64_t rows, int64_t size, double factor, T* to) {
  using A = Acc<T>;
  const int64_t ld = padded<A>(size);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < size; c += Vec<A>::width)
      store_some(to + r * size + c, load(sums + r * ld + c) * Vec<A>(static_cast<A>(factor)), smaller(Vec<A>::width, size - c));
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

GradientNames flash_gradients(const AttentionProblem&) { return {"flash", "flash"}; }

AI3_ALGORITHM(attention, flash, .accuracy = Accuracy::bounded, .error_bound = 4e-6, .supports = parameters_fit,
              .workspace = flash_workspace, .gradients = flash_gradients, .backward = flash_backward,
              .backward_workspace = flash_backward_workspace, .parameters = AI3_ATTENTION_PARAMETERS)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

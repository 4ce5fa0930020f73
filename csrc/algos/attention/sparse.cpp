// The kernel of sparse patterns: tiles of queries as in flash.cpp, which pass over pieces of keys instead of all of them.
#include "sparse.h"

#include "tile_products.h"

namespace ai3::inline AI3_LEVEL {
namespace {

constexpr int64_t kSparseRows = 64;  // of a tile of queries, at most

// Neighbouring keys that a tile of queries passes over; of listed ones, neighbours in the list.
struct KeyPiece {
  int64_t begin, end;
  bool listed, masked;
  enum class Band { none, inside, outside } band;  // of the keys that a query sees
};

// The pieces of a tile, one after the other.
class Pieces {
 public:
  AI3_INLINE Pieces(const AttentionProblem& p, const SparsePattern& s, const HeadAt& at, Range rows) : p_(p), s_(s), rows_(rows) {
    if (s.kind == SparsePattern::Kind::blocks) {
      const int64_t row = rows.begin / s.block;
      all_ = s.ends_see_all && (row == 0 || row == (p.queries - 1) / s.block);
      auto take = [&](const BlockLists& lists, int64_t& count, const int64_t*& indices) {
        count = lists.counts ? lists.counts[at.of(lists.counts_at) + row * lists.counts_at.row] : 0;
        indices = lists.indices + (lists.counts ? at.of(lists.indices_at) + row * lists.indices_at.row : 0);
      };
      take(s.partial, count_[0], indices_[0]), take(s.full, count_[1], indices_[1]);
    } else if (s.kind == SparsePattern::Kind::band) {
      count_[1] = s.global_count[at.outer * p.batch + at.batch];
    }
  }
  AI3_INLINE bool next(KeyPiece& piece) {
    using Band = KeyPiece::Band;
    if (all_ || s_.kind == SparsePattern::Kind::globals) {
      piece = {0, p_.keys, false, all_, Band::none};
      return step_++ == 0;
    }
    if (s_.kind == SparsePattern::Kind::band) {
      if (step_ == 0)
        piece = {larger(0, rows_.begin - s_.half), smaller(p_.keys, rows_.end + s_.half), false, false, Band::inside};
      else
        piece = {0, count_[1], true, false, Band::outside};
      return step_++ < 2 && (step_ == 1 || piece.end > 0);
    }
    while (step_ < 2 && at_ == count_[step_]) at_ = 0, step_++;
    if (step_ == 2) return false;
    const int64_t* const list = indices_[step_];
    const int64_t first = list[at_++];
    int64_t last = first;
    while (at_ < count_[step_] && list[at_] == last + 1) last++, at_++;
    piece = {first * s_.block, smaller((last + 1) * s_.block, p_.keys), false, step_ == 0, Band::none};
    return true;
  }

 private:
  const AttentionProblem& p_;
  const SparsePattern& s_;
  Range rows_;
  bool all_ = false;
  int step_ = 0;
  int64_t at_ = 0, count_[2] = {};
  const int64_t* indices_[2] = {};
};

AI3_INLINE int64_t tiles_of(const AttentionProblem& p, const SparsePattern& s) {
  if (s.kind == SparsePattern::Kind::blocks) return ceil_div(p.queries, s.block) * ceil_div(s.block, kSparseRows);
  return ceil_div(p.queries, kSparseRows);
}

// Rows `list[i]`, or those from `first` on where there is no list; listed ones are copied to the buffer.
template <class T>
AI3_INLINE RowsAt<T> rows_of(const T* from, int64_t stride, const int32_t* list, int64_t first, int64_t count, int64_t size,
                             T* buffer) {
  if (!list) return {from + first * stride, stride};
  for (int64_t r = 0; r < count; r++)
    __builtin_memcpy(buffer + r * size, from + list[first + r] * stride, static_cast<size_t>(size) * sizeof(T));
  return {buffer, size};
}

// One tile of queries of one head.
template <class T>
struct SparseTile {
  using A = Acc<T>;
  static constexpr int64_t P = kPanel<A>;
  const AttentionProblem& p;
  const SparsePattern& s;
  HeadAt at;
  const Token* tokens;
  const int32_t* globals;
  MaskRows<A> mask;
  Range rows;

  AI3_INLINE SparseTile(const AttentionProblem& problem, const SparsePattern& pattern, const Operand& masks, int64_t head,
                        int64_t tile)
      : p(problem), s(pattern), at(p, head), mask(p, masks, at) {
    const int64_t batch = at.outer * p.batch + at.batch;
    tokens = s.tokens ? s.tokens + batch * p.keys : nullptr, globals = s.globals ? s.globals + batch * p.keys : nullptr;
    int64_t all = p.queries, first = tile * kSparseRows;
    if (s.kind == SparsePattern::Kind::blocks) {
      const int64_t each = ceil_div(s.block, kSparseRows), block = tile / each;
      all = smaller(all, (block + 1) * s.block), first = block * s.block + tile % each * kSparseRows;
    } else if (s.kind == SparsePattern::Kind::globals) {
      all = s.global_count[batch];
    }
    rows = {first, larger(first, smaller(all, first + kSparseRows))};
  }
  AI3_INLINE const int32_t* listed_rows() const { return s.kind == SparsePattern::Kind::globals ? globals : nullptr; }
  AI3_INLINE int64_t query(int64_t r) const { return listed_rows() ? globals[rows.begin + r] : rows.begin + r; }
  AI3_INLINE int64_t key(const KeyPiece& piece, int64_t j) const { return piece.listed ? globals[j] : j; }
  // Whether this pattern says what the query of a row is; padded ones are zeros, global ones are another's.
  AI3_INLINE Token token(int64_t r) const {
    return s.kind == SparsePattern::Kind::band ? tokens[rows.begin + r] : Token::ordinary;
  }
  AI3_INLINE Range lanes_near(int64_t of_key, int64_t first) const {
    return {of_key - s.half - first, of_key + s.half + 1 - first};
  }

  // What a panel of queries sees of the keys of a piece.
  struct Sight {
    bool none, added, diagonal;  // nothing; what `added` holds is to be added; the band begins or ends within
    AI3_INLINE bool some() const { return added || diagonal; }
  };
  Sight look(const KeyPiece& piece, Range keys, int64_t row, int64_t queries, A* added) const {
    Sight sight{false, false, false};
    const int64_t first = rows.begin + row, count = keys.size();
    auto hide = [&](int64_t c, Range lanes) {
      lanes = part_of(lanes, 0, P);
      if (lanes.size() <= 0) return;
      if (!sight.added)
        for (int64_t i = 0; i < count * P; i++) added[i] = 0;
      sight.added = true;
      for (int64_t l = lanes.begin; l < lanes.end; l++) added[c * P + l] = kHidden<A>;
    };
    if (piece.masked && mask) {
      sight.none = !reads_any(mask, first, queries, keys.begin, count, added), sight.added = true;
      if (sight.none) return sight;
    }
    if (tokens)
      for (int64_t c = 0; c < count; c++)
        if (tokens[key(piece, keys.begin + c)] == Token::padded) hide(c, {0, P});
    if (piece.band == KeyPiece::Band::outside)
      for (int64_t c = 0; c < count; c++) hide(c, lanes_near(globals[keys.begin + c], first));
    if (piece.band == KeyPiece::Band::inside)
      sight.diagonal = first + queries - 1 - s.half > keys.begin || first + s.half + 1 < keys.end;
    sight.none = sight.added && !any_seen(added, count);
    return sight;
  }
  AI3_INLINE void apply(const Sight& sight, Range keys, int64_t row, const A* added, A* scores) const {
    if (sight.added) add_mask(added, keys.size(), scores);
    if (sight.diagonal) hide_lanes(keys.size(), scores, [&](int64_t c) { return lanes_near(keys.begin + c, rows.begin + row); });
  }
  AI3_INLINE bool sees(const Sight& sight, Range keys, int64_t row, const A* added, int64_t r, int64_t c) const {
    if (sight.added && added[c * P + r] == kHidden<A>) return false;
    const Range lanes = sight.diagonal ? lanes_near(keys.begin + c, rows.begin + row) : Range{0, P};
    return r >= lanes.begin && r < lanes.end;
  }
  // What dropout multiplies the weights of a panel of queries by; of lanes beyond it, anything.
  void kept_of(const Dropout<A>& dropout, const KeyPiece& piece, Range keys, int64_t head, int64_t row, A* to) const {
    const int64_t first = head * p.queries;
    if (!piece.listed && !listed_rows())
      return dropout.template of_lanes<P>(first + rows.begin + row, keys.begin, keys.size(), to);
    for (int64_t c = 0; c < keys.size(); c++)
      for (int64_t l = 0; l < smaller(P, rows.size() - row); l++)
        dropout.of_row(first + query(row + l), key(piece, keys.begin + c), 1, to + c * P + l);
  }
  // Those of a piece that one of a panel's queries may see, from an even one on.
  AI3_INLINE Range keys_of(const KeyPiece& piece, Range keys, int64_t row, int64_t queries) const {
    if (piece.band != KeyPiece::Band::inside) return keys;
    const int64_t first = rows.begin + row, skipped = larger(0, first - s.half - keys.begin);
    return {keys.begin + skipped / 2 * 2, smaller(keys.end, first + queries + s.half)};
  }
};

// body(piece, tile of its keys, k, v) for all keys that a tile of queries may see.
template <class T, class Buffers, class Body>
AI3_INLINE void over_keys(const SparseTile<T>& t, const T* key, const T* value, const Buffers& w, const Body& body) {
  const AttentionProblem& p = t.p;
  Pieces pieces(p, t.s, t.at, t.rows);
  for (KeyPiece piece; pieces.next(piece);)
    for (int64_t j = piece.begin; j < piece.end; j += kKeys) {
      const Range keys{j, smaller(j + kKeys, piece.end)};
      const int32_t* const list = piece.listed ? t.globals : nullptr;
      body(piece, keys, rows_of(key, p.key_at.row, list, j, keys.size(), p.size, w.listed_keys),
           rows_of(value, p.value_at.row, list, j, keys.size(), p.value_size, w.listed_values));
    }
}

// ---- Forward ----------------------------------------------------------------------------------------------------------------
template <class T, class Products>
struct SparseForward {
  using A = Acc<T>;
  static constexpr int64_t P = kPanel<A>;
  Products products;
  A *scores, *added, *kept, *most, *total;
  T *listed_keys, *listed_values, *listed_queries;

  AI3_INLINE static int64_t own(const AttentionProblem& p, bool lists) {
    return checked_add(Products::size(p, kSparseRows),
                       cut_size<A>({kKeys * P, kKeys * P, p.dropout > 0 ? kKeys * P : 0, kSparseRows, kSparseRows,
                                    lists ? checked_mul(kKeys, p.size) : 0, lists ? checked_mul(kKeys, p.value_size) : 0,
                                    lists ? checked_mul(kSparseRows, p.size) : 0}));
  }
  AI3_INLINE SparseForward(const AttentionProblem& p, bool lists, Cut<A> cut) : products(p, kSparseRows, cut) {
    scores = cut.take(kKeys * P), added = cut.take(kKeys * P), kept = cut.take(p.dropout > 0 ? kKeys * P : 0);
    most = cut.take(kSparseRows), total = cut.take(kSparseRows);
    auto of_type = [&](int64_t count) { return reinterpret_cast<T*>(cut.take(lists ? count : 0)); };
    listed_keys = of_type(kKeys * p.size), listed_values = of_type(kKeys * p.value_size);
    listed_queries = of_type(kSparseRows * p.size);
  }
};

template <class T, class Products>
void attend_tile(const SparseTile<T>& t, const AttentionOperands& m, int64_t head, SparseForward<T, Products> w) {
  using A = Acc<T>;
  constexpr int64_t P = kPanel<A>;
  const AttentionProblem& p = t.p;
  const int64_t rows = t.rows.size(), panels = ceil_div(rows, P);
  const RowsAt<T> query = rows_of(m.query.read<T>() + t.at.of(p.query_at), p.query_at.row, t.listed_rows(), t.rows.begin, rows,
                                  p.size, w.listed_queries);
  for (int64_t b = 0; b < panels; b++)
    w.products.begin(b, {query.data + b * P * query.stride, query.stride}, smaller(P, rows - b * P));
  for (int64_t i = 0; i < panels * P; i++) w.most[i] = kHidden<A>, w.total[i] = 0;
  const Dropout<A> dropout(p, m.dropout_seed);
  over_keys(t, m.key.read<T>() + t.at.of_kv(p.key_at), m.value.read<T>() + t.at.of_kv(p.value_at), w,
            [&](const KeyPiece& piece, Range all, const RowsAt<T>& k, const RowsAt<T>& v) {
              w.products.read(k, v, all.size());
              int finite = -1;  // not known
              for (int64_t b = 0; b < panels; b++) {
                const int64_t row = b * P, queries = smaller(P, rows - row);
                const Range keys = t.keys_of(piece, all, row, queries);
                if (keys.size() <= 0) continue;
                const auto sight = t.look(piece, keys, row, queries, w.added);
                if (sight.none) continue;
                const Range of_tile{keys.begin - all.begin, keys.end - all.begin};
                w.products.score(b, of_tile, false, w.scores);
                t.apply(sight, keys, row, w.added, w.scores);
                alignas(64) A scale[P];
                soften<2>(w.scores, keys.size(), w.most + row, w.total + row, scale);
                if (dropout) {
                  t.kept_of(dropout, piece, keys, head, row, w.kept);
                  drop(w.kept, keys.size(), w.scores);
                }
                w.products.rescale(b, queries, scale);
                const bool hides = sight.some() || of_tile.end < all.size();  // some of the tile's keys from these on
                if (hides && finite < 0) finite = w.products.values_finite(all.size());
                if (hides && !finite)
                  w.products.add_seen(b, queries, of_tile, w.scores,
                                      [&](int64_t r, int64_t c) { return t.sees(sight, keys, row, w.added, r, c); });
                else
                  w.products.add(b, queries, of_tile, w.scores);
              }
            });
  T* const output = m.output.write<T>() + t.at.of(p.output_at);
  auto output_of = [&](int64_t r) { return output + t.query(r) * p.output_at.row; };
  for (int64_t b = 0; b < panels; b++) {
    const int64_t queries = smaller(P, rows - b * P);
    alignas(64) A share[P] = {};
    for (int64_t l = 0; l < queries; l++) {
      const int64_t r = b * P + l;
      const Token token = t.token(r);
      const bool seen = w.total[r] != 0 && token != Token::padded;
      share[l] = seen ? 1 / w.total[r] : A(0);
      if (m.logsumexp && token != Token::global)
        m.logsumexp.write<A>()[head * p.queries + t.query(r)] =
            seen ? w.most[r] + static_cast<A>(__builtin_log(static_cast<double>(w.total[r]))) : kHidden<A>;
    }
    w.products.end(b, queries, share,
                   [&](int64_t l) { return t.token(b * P + l) == Token::global ? nullptr : output_of(b * P + l); });
  }
  for (int64_t r = 0; r < rows; r++)
    if (t.token(r) == Token::padded) __builtin_memset(output_of(r), 0, static_cast<size_t>(p.value_size) * sizeof(T));
}

// ---- Gradients --------------------------------------------------------------------------------------------------------------
// sums[key] += weights[key][query] * rows[query], for R keys and two vectors of columns, or one.
template <class A, bool half, int R = kRows>
AI3_INLINE void add_products_tile(int64_t keys, const A* weights, const RowsAt<A>& rows, int64_t queries, A* sums, int64_t ld) {
  if constexpr (R > 1)
    if (keys < R) return add_products_tile<A, half, R - 1>(keys, weights, rows, queries, sums, ld);
  MicroTile<A, R, half> tile;
  tile.clear();
  const A* row = rows.data;
  for (int64_t j = 0; j < queries; j++, weights++, row += rows.stride) {
    const Vec<A> left = load(row), right = half ? left : load(row + Vec<A>::width);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      const Vec<A> w = weights[r * kPanel<A>];
      tile.left[r] = fma(w, left, tile.left[r]);
      if constexpr (!half) tile.right[r] = fma(w, right, tile.right[r]);
    }
  }
  tile.add(sums, ld);
  tile.store(sums, ld);
}
template <class A>
void add_products(int64_t keys, const A* weights, const RowsAt<A>& rows, int64_t queries, int64_t columns, A* sums) {
  const int64_t ld = padded<A>(columns), slabs = ceil_div(keys, kRows);
  for (int64_t c = 0; c < columns; c += kPanel<A>)
    for (int64_t i = 0; i < slabs; i++) {
      const Share some = share(keys, slabs, i);
      const RowsAt<A> from{rows.data + c, rows.stride};
      A* const to = sums + some.begin * ld + c;
      if (columns - c <= Vec<A>::width)
        add_products_tile<A, true>(some.size(), weights + some.begin * kPanel<A>, from, queries, to, ld);
      else
        add_products_tile<A, false>(some.size(), weights + some.begin * kPanel<A>, from, queries, to, ld);
    }
}

template <class T>
struct SparseBackward {
  using A = Acc<T>;
  static constexpr int64_t P = kPanel<A>;
  A *packed, *packed_grad, *scores, *products, *added, *kept, *sums, *logsumexp, *delta, *of_queries, *of_grads, *of_keys,
      *of_values;
  A *grad_keys, *grad_values, *some_keys, *some_values;
  T *listed_keys, *listed_values, *listed_queries, *listed_grads;

  template <class Take>
  AI3_INLINE void cut(const AttentionProblem& p, bool lists, const Take& take) {
    const int64_t ld = padded<A>(p.size), value_ld = padded<A>(p.value_size);
    auto if_lists = [&](int64_t rows, int64_t size) { return lists ? checked_mul(rows, size) : 0; };
    take(packed, checked_mul(kSparseRows, p.size)), take(packed_grad, checked_mul(kSparseRows, p.value_size));
    take(scores, kKeys * P), take(products, kKeys * P), take(added, kKeys * P), take(kept, p.dropout > 0 ? kKeys * P : 0);
    take(sums, checked_mul(kSparseRows, ld));
    take(logsumexp, kSparseRows), take(delta, kSparseRows);
    take(of_queries, checked_mul(kSparseRows, ld)), take(of_grads, checked_mul(kSparseRows, value_ld));
    take(of_keys, buffer_of<T>(kKeys, p.size, true)), take(of_values, buffer_of<T>(kKeys, p.value_size, true));
    take(grad_keys, checked_mul(p.keys, ld)), take(grad_values, checked_mul(p.keys, value_ld));
    take(some_keys, if_lists(kKeys, ld)), take(some_values, if_lists(kKeys, value_ld));
    take(listed_keys, if_lists(kKeys, p.size)), take(listed_values, if_lists(kKeys, p.value_size));
    take(listed_queries, if_lists(kSparseRows, p.size)), take(listed_grads, if_lists(kSparseRows, p.value_size));
  }
  AI3_INLINE static int64_t own(const AttentionProblem& p, bool lists) {
    int64_t sum = 0;
    SparseBackward none;
    none.cut(p, lists, [&](auto*&, int64_t count) { sum = checked_add(sum, cut_size<A>({count})); });
    return sum;
  }
  AI3_INLINE void take_from(const AttentionProblem& p, bool lists, A* from) {
    Cut<A> rest{from};
    cut(p, lists, [&]<class E>(E*& part, int64_t count) { part = reinterpret_cast<E*>(rest.take(count)); });
  }
};

template <class T>
void differentiate_tile(const SparseTile<T>& t, const AttentionGradients& m, int64_t head, const SparseBackward<T>& w) {
  using A = Acc<T>;
  constexpr int64_t P = kPanel<A>;
  const AttentionProblem& p = t.p;
  const int64_t rows = t.rows.size(), panels = ceil_div(rows, P), ld = padded<A>(p.size), value_ld = padded<A>(p.value_size);
  const RowsAt<T> query = rows_of(m.query.read<T>() + t.at.of(p.query_at), p.query_at.row, t.listed_rows(), t.rows.begin, rows,
                                  p.size, w.listed_queries),
                  grad = rows_of(m.grad_output.read<T>() + t.at.of(p.output_at), p.output_at.row, t.listed_rows(), t.rows.begin,
                                 rows, p.value_size, w.listed_grads);
  RowsAt<A> q = rows_at(query.data, query.stride, rows, p.size, true, w.of_queries),
            g = rows_at(grad.data, grad.stride, rows, p.value_size, true, w.of_grads);
  for (int64_t b = 0; b < panels; b++) {
    const int64_t count = smaller(P, rows - b * P);
    pack_rows(query.data + b * P * query.stride, query.stride, count, p.size, p.scale, w.packed + b * P * p.size);
    pack_rows(grad.data + b * P * grad.stride, grad.stride, count, p.value_size, 1, w.packed_grad + b * P * p.value_size);
  }
  bool all = true;  // are ordinary
  for (int64_t r = 0; r < panels * P; r++) {
    w.logsumexp[r] = w.delta[r] = 0;
    if (r >= rows) continue;
    all = all && t.token(r) == Token::ordinary;
    const int64_t i = t.query(r);
    const T* const y = m.output.read<T>() + t.at.of(p.output_at) + i * p.output_at.row;
    Vec<A> sum(A(0));
    for (int64_t c = 0; c < p.value_size; c += Vec<A>::width)
      sum = fma(load(g.data + r * g.stride + c), load_some(y + c, smaller(Vec<A>::width, p.value_size - c)), sum);
    for (int l = 0; l < Vec<A>::width; l++) w.delta[r] += sum[l];
    w.logsumexp[r] = m.logsumexp.read<A>()[head * p.queries + i];
  }
  if (!all) {  // the gradients of keys add rows of all queries, with weights of 0 that NaN would survive
    auto only_ordinary = [&](const RowsAt<A>& from, int64_t size, A* to) {
      for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < size; c += Vec<A>::width)
          store(to + r * padded<A>(size) + c, t.token(r) == Token::ordinary
                                                  ? load_some(from.data + r * from.stride + c, smaller(Vec<A>::width, size - c))
                                                  : Vec<A>(A(0)));
      return RowsAt<A>{to, padded<A>(size)};
    };
    q = only_ordinary(q, p.size, w.of_queries), g = only_ordinary(g, p.value_size, w.of_grads);
  }
  for (int64_t i = 0; i < panels * P * ld; i += Vec<A>::width) store(w.sums + i, Vec<A>(A(0)));
  const Dropout<A> dropout(p, m.dropout_seed);
  over_keys(t, m.key.read<T>() + t.at.of_kv(p.key_at), m.value.read<T>() + t.at.of_kv(p.value_at), w,
            [&](const KeyPiece& piece, Range whole, const RowsAt<T>& key, const RowsAt<T>& value) {
              const RowsAt<A> k = rows_at(key.data, key.stride, whole.size(), p.size, true, w.of_keys),
                              v = rows_at(value.data, value.stride, whole.size(), p.value_size, true, w.of_values);
              int finite = -1;  // not known
              A *of_keys = w.grad_keys + whole.begin * ld, *of_values = w.grad_values + whole.begin * value_ld;
              if (piece.listed) {
                of_keys = w.some_keys, of_values = w.some_values;
                for (int64_t i = 0; i < whole.size() * ld; i += Vec<A>::width) store(of_keys + i, Vec<A>(A(0)));
                for (int64_t i = 0; i < whole.size() * value_ld; i += Vec<A>::width) store(of_values + i, Vec<A>(A(0)));
              }
              for (int64_t b = 0; b < panels; b++) {
                const int64_t row = b * P, queries = smaller(P, rows - row);
                const Range keys = t.keys_of(piece, whole, row, queries);
                if (keys.size() <= 0) continue;
                const auto sight = t.look(piece, keys, row, queries, w.added);
                if (sight.none) continue;
                const int64_t skipped = keys.begin - whole.begin;
                const RowsAt<A> some{k.data + skipped * k.stride, k.stride};
                multiply_rows(some, keys.size(), w.packed + row * p.size, p.size, w.scores);
                multiply_rows(RowsAt<A>{v.data + skipped * v.stride, v.stride}, keys.size(), w.packed_grad + row * p.value_size,
                              p.value_size, w.products);
                t.apply(sight, keys, row, w.added, w.scores);
                if (!all)
                  for (int64_t l = 0; l < queries; l++)
                    if (t.token(row + l) != Token::ordinary)
                      for (int64_t c = 0; c < keys.size(); c++) w.scores[c * P + l] = kHidden<A>;
                if (dropout) {
                  t.kept_of(dropout, piece, keys, head, row, w.kept);
                  drop(w.kept, keys.size(), w.products);
                }
                differentiate<A, true>(w.scores, w.products, keys.size(), w.logsumexp + row, w.delta + row);
                if (dropout) drop(w.kept, keys.size(), w.scores);
                if (m.grad_query) {
                  if (sight.some() && finite < 0) finite = all_finite(k, whole.size(), p.size);
                  A* const to = w.sums + row * ld;
                  if (sight.some() && !finite)
                    add_weighted_seen(queries, w.products, some, keys.size(), p.size, to,
                                      [&](int64_t r, int64_t c) { return t.sees(sight, keys, row, w.added, r, c); });
                  else
                    add_weighted(queries, w.products, some, keys.size(), p.size, to);
                }
                const RowsAt<A> of_q{q.data + row * q.stride, q.stride}, of_g{g.data + row * g.stride, g.stride};
                if (m.grad_key) add_products(keys.size(), w.products, of_q, queries, p.size, of_keys + skipped * ld);
                if (m.grad_value)
                  add_products(keys.size(), w.scores, of_g, queries, p.value_size, of_values + skipped * value_ld);
              }
              if (piece.listed)
                for (int64_t c = 0; c < whole.size(); c++) {
                  const int64_t j = t.key(piece, whole.begin + c);
                  for (int64_t i = 0; i < ld; i += Vec<A>::width)
                    store(w.grad_keys + j * ld + i, load(w.grad_keys + j * ld + i) + load(of_keys + c * ld + i));
                  for (int64_t i = 0; i < value_ld; i += Vec<A>::width)
                    store(w.grad_values + j * value_ld + i,
                          load(w.grad_values + j * value_ld + i) + load(of_values + c * value_ld + i));
                }
            });
  if (!m.grad_query) return;
  T* const to = m.grad_query.write<T>() + head * p.queries * p.size;
  for (int64_t r = 0; r < rows; r++) {
    if (t.token(r) != Token::ordinary)
      for (int64_t c = 0; c < ld; c += Vec<A>::width) store(w.sums + r * ld + c, Vec<A>(A(0)));
    store_gradient(w.sums + r * ld, 1, p.size, p.scale, to + t.query(r) * p.size);
  }
}

}  // namespace

int64_t sparse_workspace(const AttentionProblem& p, bool lists) {
  return with_type(p.dtype, [&]<class T>() {
    return with_products<T>(p, [&]<class Products>() {
      return workspace_bytes<Acc<T>>(checked_mul(p.threads, SparseForward<T, Products>::own(p, lists)));
    });
  });
}
void attend_sparse(const AttentionProblem& p, const AttentionOperands& m, const SparsePattern& s, bool lists,
                   Workspace& workspace) {
  with_type(p.dtype, [&]<class T>() {
    with_products<T>(p, [&]<class Products>() {
      using A = Acc<T>;
      using Forward = SparseForward<T, Products>;
      const int64_t own = Forward::own(p, lists), tiles = tiles_of(p, s);
      A* const all = workspace.take<A>(p.threads * own);
      parallel_for(p.threads, p.outer * p.batch * p.heads * tiles, [&](int64_t n, int thread) {
        const SparseTile<T> tile(p, s, m.mask, n / tiles, n % tiles);
        if (tile.rows.size() > 0) attend_tile(tile, m, n / tiles, Forward(p, lists, Cut<A>{all + thread * own}));
      });
    });
  });
}

int64_t sparse_backward_workspace(const AttentionProblem& p, bool lists) {
  return with_type(p.dtype,
                   [&]<class T>() { return workspace_bytes<Acc<T>>(checked_mul(p.threads, SparseBackward<T>::own(p, lists))); });
}
void differentiate_sparse(const SparsePart* parts, int count, Common common, bool lists, Workspace& workspace) {
  const AttentionProblem& first = *parts->p;
  with_type(first.dtype, [&]<class T>() {
    using A = Acc<T>;
    const int64_t own = SparseBackward<T>::own(first, lists), group = first.heads / first.kv_heads;
    A* const all = workspace.take<A>(first.threads * own);
    auto clear = [](A* sums, int64_t rows, int64_t size) {
      for (int64_t c = 0; c < rows * padded<A>(size); c += Vec<A>::width) store(sums + c, Vec<A>(A(0)));
    };
    parallel_for(first.threads, first.outer * first.batch * first.kv_heads, [&](int64_t head, int thread) {
      SparseBackward<T> w;
      w.take_from(first, lists, all + thread * own);
      for (int i = 0; i < count; i++) {
        const AttentionProblem& p = *parts[i].p;
        const AttentionGradients& m = *parts[i].m;
        const SparsePattern& s = *parts[i].s;
        if (i == 0 || !common.keys) clear(w.grad_keys, p.keys, p.size);
        if (i == 0 || !common.values) clear(w.grad_values, p.keys, p.value_size);
        if (i > 0 && m.grad_query && m.grad_query.data != parts->m->grad_query.data) {  // of the other tokens' queries
          T* const to = m.grad_query.write<T>() + head * group * p.queries * p.size;
          __builtin_memset(to, 0, static_cast<size_t>(group * p.queries * p.size) * sizeof(T));
        }
        const int64_t tiles = tiles_of(p, s);
        for (int64_t n = 0; n < group * tiles; n++) {
          const int64_t of_query = head * group + n / tiles;
          const SparseTile<T> tile(p, s, m.mask, of_query, n % tiles);
          if (tile.rows.size() > 0) differentiate_tile(tile, m, of_query, w);
        }
        const bool last = i + 1 == count;
        if (m.grad_key && (last || !common.keys))
          store_gradient(w.grad_keys, p.keys, p.size, p.scale, m.grad_key.write<T>() + head * p.keys * p.size);
        if (m.grad_value && (last || !common.values))
          store_gradient(w.grad_values, p.keys, p.value_size, 1, m.grad_value.write<T>() + head * p.keys * p.value_size);
      }
    });
  });
}

}  // namespace ai3::inline AI3_LEVEL

// The kernels of sparse patterns: math.cuh's, whose products are of tiles of queries and keys, and leave out the tiles in which
// no query sees a key. Which those are, tables of each chunk say, that are made on the device: nothing is read back to the host.
// A key that is listed several times counts as often, by what its score is raised by.
#include "math.cuh"
#include "sparse.cuh"

namespace ai3::inline AI3_LEVEL {
namespace {

constexpr int64_t kTile = 64, kStep = 16, kMicro = 8;  // a tile's rows and columns; what is summed over at once; of a thread
constexpr int kTileThreads = kTile / kMicro * kTile / kMicro;
constexpr int64_t kTileRow = kTile + 4;  // in shared memory

// What a pattern says of a chunk.
struct Sparse {
  SparsePattern::Kind kind;
  int64_t all_batches, all_keys, first_batch, first_query;
  // How often a block of keys is listed: [batch of the chunk][head][block of queries of the chunk][block][in part, in full].
  const int32_t* counts;
  int64_t block, table_heads, rows, first_row, blocks;
  const Token* tokens;
  int64_t half;
  // Whether some query of a tile sees some of its keys: [batch of the chunk][head, or one for all][tile of queries][tile of
  // keys].
  const uint8_t* tiles;
  int64_t tile_heads, query_tiles, key_tiles;

  __device__ Token token(const ScoreRow& at, int64_t n) const {
    return tokens[(at.outer * all_batches + at.batch) * all_keys + n];
  }
  __device__ bool computes(const ScoreRow& at) const {
    if (kind == SparsePattern::Kind::blocks) return true;
    return (token(at, at.query) == Token::global) == (kind == SparsePattern::Kind::globals);
  }
  __device__ bool reaches(const ScoreRow& at, int64_t key) const {
    return reached(at.batch - first_batch, at.head, (at.query - first_query) / kTile, key / kTile);
  }
  __device__ bool reached(int64_t batch, int64_t head, int64_t query_tile, int64_t key_tile) const {
    return tiles[((batch * tile_heads + (tile_heads == 1 ? 0 : head)) * query_tiles + query_tile) * key_tiles + key_tile];
  }
  __device__ const int32_t* counted(int64_t batch, int64_t head, int64_t row, int64_t j) const {
    return counts + 2 * (((batch * table_heads + head) * rows + row) * blocks + j);
  }
  // e^score is counted as often as the key is listed: in part with its mask, in full without.
  template <class A>
  __device__ A added(const ScoreRow& at, int64_t key, A of_mask) const {
    constexpr A hidden = -std::numeric_limits<A>::infinity();
    if (kind != SparsePattern::Kind::blocks) {
      const Token seen = token(at, key), of_query = token(at, at.query);
      if (seen == Token::padded || of_query == Token::padded) return hidden;
      const int64_t apart = key - at.query;
      const bool near = apart >= -half && apart <= half;
      return kind == SparsePattern::Kind::globals || near || seen == Token::global ? A(0) : hidden;
    }
    const int32_t* const listed =
        counted(at.batch - first_batch, at.head, divided(at.query, block).quotient - first_row, divided(key, block).quotient);
    const A in_part = static_cast<A>(listed[0]), in_full = static_cast<A>(listed[1]);
    if (in_part == 0 || of_mask == hidden) return in_full == 0 ? hidden : in_full == 1 ? A(0) : static_cast<A>(log(in_full));
    if (in_full == 0) return in_part == 1 ? of_mask : of_mask + static_cast<A>(log(in_part));
    const A top = of_mask > 0 ? of_mask : A(0);
    return top + static_cast<A>(log(in_full * exp(-top) + in_part * exp(of_mask - top)));
  }
};

// ---- Tables
struct Sizes {
  int64_t rows, blocks, counts, tile_heads, query_tiles, key_tiles, tiles;
  Sizes(const AttentionProblem& p, const Part& part, const SparsePattern& s) {
    const bool lists = s.kind == SparsePattern::Kind::blocks;
    rows = lists ? checked_add(ceil_div(part.queries, s.block), 1) : 0, blocks = lists ? ceil_div(p.keys, s.block) : 0;
    counts = checked_product({2, part.batches, p.heads, rows, blocks});
    tile_heads = lists ? p.heads : 1, query_tiles = ceil_div(part.queries, kTile), key_tiles = ceil_div(p.keys, kTile);
    tiles = checked_product({part.batches, tile_heads, query_tiles, key_tiles});
  }
};
// Of the rows from first_row on. Nobody could check lists: what is beyond their room, or no block's number, is left out.
void count_listed(const AttentionProblem& p, const SparsePattern& s, const Chunk& c, const Sparse& t, int32_t* counts,
                  const Workspace& workspace) {
  for_each(2 * c.batches * t.table_heads * t.rows * t.blocks, workspace, kWhat, [=] __device__(int64_t i) { counts[i] = 0; });
  const int64_t last = (p.queries - 1) / s.block;
  for_each(c.batches * t.table_heads * t.rows, workspace, kWhat,
           [=, partial = s.partial, full = s.full, ends = s.ends_see_all, outer = c.outer] __device__(int64_t i) {
             const Quotient by_row = divided(i, t.rows), by_head = divided(by_row.quotient, t.table_heads);
             const int64_t batch = t.first_batch + by_head.quotient, head = by_head.rest, row = t.first_row + by_row.rest;
             int32_t* const to = counts + 2 * i * t.blocks;
             if (row > last) return;
             if (ends && (row == 0 || row == last)) {
               for (int64_t j = 0; j < t.blocks; j++) to[2 * j] = 1;
               return;
             }
             auto count = [&](const BlockLists& lists, int in_full) {
               if (!lists.counts) return;
               const AttentionStrides &n = lists.counts_at, &l = lists.indices_at;
               const int64_t listed = lists.counts[outer * n.outer + batch * n.batch + head * n.head + row * n.row];
               const int64_t* const list = lists.indices + outer * l.outer + batch * l.batch + head * l.head + row * l.row;
               for (int64_t k = 0; k < listed && k < lists.most; k++)
                 if (list[k] >= 0 && list[k] < t.blocks) to[2 * list[k] + in_full]++;
             };
             count(partial, 0), count(full, 1);
           });
}
void mark_tiles(const Chunk& c, const Sparse& t, uint8_t* tiles, const Workspace& workspace) {
  for_each(c.batches * t.tile_heads * t.query_tiles * t.key_tiles, workspace, kWhat,
           [=, queries = c.queries, outer = c.outer] __device__(int64_t i) {
             const Quotient by_keys = divided(i, t.key_tiles), by_queries = divided(by_keys.quotient, t.query_tiles),
                            by_head = divided(by_queries.quotient, t.tile_heads);
             auto end = [](int64_t begin, int64_t all) { return begin + kTile < all ? begin + kTile : all; };
             const int64_t batch = by_head.quotient, head = by_head.rest, key = by_keys.rest * kTile,
                           keys_end = end(key, t.all_keys), in_chunk = by_queries.rest * kTile, query = t.first_query + in_chunk,
                           queries_end = t.first_query + end(in_chunk, queries);
             bool seen = false;
             if (t.kind == SparsePattern::Kind::blocks) {
               for (int64_t row = query / t.block; row <= (queries_end - 1) / t.block && !seen; row++)
                 for (int64_t j = key / t.block; j <= (keys_end - 1) / t.block && !seen; j++) {
                   const int32_t* const listed = t.counted(batch, head, row - t.first_row, j);
                   seen = listed[0] + listed[1] > 0;
                 }
             } else {
               const Token* const tokens = t.tokens + (outer * t.all_batches + t.first_batch + batch) * t.all_keys;
               const bool of_keys = t.kind == SparsePattern::Kind::band;
               seen = of_keys && key <= queries_end - 1 + t.half && keys_end - 1 >= query - t.half;
               for (int64_t n = of_keys ? key : query; n < (of_keys ? keys_end : queries_end) && !seen; n++)
                 seen = tokens[n] == Token::global;
             }
             tiles[i] = seen;
           });
}

// ---- Products of tiles
// sums += a b for a tile: a(k, m) and b(k, n) for k up to `depth` are read once, with m or n, or k, the one that neighbouring
// threads read side by side. All threads of a block call it.
template <bool a_by_depth, bool b_by_depth, class A, class LoadA, class LoadB>
__device__ __forceinline__ void add_products(A (&sums)[kMicro][kMicro], int64_t depth, A* memory, const LoadA& a,
                                             const LoadB& b) {
  const int thread = static_cast<int>(threadIdx.x), x = thread % (kTile / kMicro), y = thread / (kTile / kMicro);
  A *const left = memory, *const right = memory + kStep * kTileRow;
  auto fill = [&](A* to, bool by_depth, int64_t first, const auto& load) {
    for (int64_t e = thread; e < kStep * kTile; e += kTileThreads) {
      const int64_t k = by_depth ? e % kStep : e / kTile, m = by_depth ? e / kStep : e % kTile;
      to[k * kTileRow + m] = first + k < depth ? load(first + k, m) : A(0);
    }
  };
  for (int64_t k = 0; k < depth; k += kStep) {
    __syncthreads();  // what was there has been read
    fill(left, a_by_depth, k, a), fill(right, b_by_depth, k, b);
    __syncthreads();
#pragma unroll 4
    for (int64_t i = 0; i < kStep; i++) {
      A of_rows[kMicro], of_columns[kMicro];
#pragma unroll
      for (int j = 0; j < kMicro; j++) {
        of_rows[j] = left[i * kTileRow + y * kMicro + j];
        of_columns[j] = right[i * kTileRow + x * kMicro + j];
      }
#pragma unroll
      for (int r = 0; r < kMicro; r++)
#pragma unroll
        for (int j = 0; j < kMicro; j++) sums[r][j] += of_rows[r] * of_columns[j];
    }
  }
}
template <class A>
constexpr int64_t kTileBytes = 2 * kStep* kTileRow* static_cast<int64_t>(sizeof(A));
// Puts a thread's sums where they belong: row(m) says where row m of the tile begins, null of a row that is not there, and
// put(element, sum) is called for each of its columns.
template <class A, class Row, class Put>
__device__ __forceinline__ void put_sums(A (&sums)[kMicro][kMicro], int64_t columns, const Row& row, const Put& put) {
  const int thread = static_cast<int>(threadIdx.x), x = thread % (kTile / kMicro), y = thread / (kTile / kMicro);
#pragma unroll
  for (int r = 0; r < kMicro; r++) {
    A* const to = row(y * kMicro + r);
    if (!to) continue;
#pragma unroll
    for (int j = 0; j < kMicro; j++)
      if (const int64_t n = x * kMicro + j; n < columns) put(to[n], sums[r][j]);
  }
}
template <class T>
struct At {
  T* data;
  AttentionStrides at;
  __device__ T* head(int64_t outer, int64_t batch, int64_t head) const {
    return data + outer * at.outer + batch * at.batch + head * at.head;
  }
};

// A block of threads makes one tile after the other.
template <class S, class T = typename S::Element>
__global__ void __launch_bounds__(kTileThreads)
    scores_of_tiles(S of, Chunk c, At<const T> queries, At<const T> keys, int64_t size, typename S::A* to, int64_t ld) {
  using A = typename S::A;
  const int64_t tiles = c.batches * of.heads * of.query_tiles * of.key_tiles;
  for (int64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
    const Quotient by_keys = divided(t, of.key_tiles), by_queries = divided(by_keys.quotient, of.query_tiles),
                   by_head = divided(by_queries.quotient, of.heads);
    const int64_t batch = by_head.quotient, head = by_head.rest, first = by_queries.rest * kTile, key = by_keys.rest * kTile;
    if (!of.reached(batch, head, by_queries.rest, by_keys.rest)) continue;
    const T* const q = queries.head(c.outer, c.first_batch + batch, head) + (c.first_query + first) * queries.at.row;
    const T* const k = keys.head(c.outer, c.first_batch + batch, head / (of.heads / of.kv_heads)) + key * keys.at.row;
    const int64_t rows = c.queries - first, columns = of.keys - key;
    A sums[kMicro][kMicro] = {};
    add_products<true, true>(
        sums, size, shared<A>(), [&](int64_t e, int64_t m) { return m < rows ? load_acc(q + m * queries.at.row + e) : A(0); },
        [&](int64_t e, int64_t n) { return n < columns ? load_acc(k + n * keys.at.row + e) : A(0); });
    A* const here = to + ((batch * of.heads + head) * c.queries + first) * ld + key;
    put_sums(
        sums, columns, [&](int64_t m) { return m < rows ? here + m * ld : nullptr; }, [](A& element, A sum) { element = sum; });
  }
}
// Weights, or their gradients, times rows of keys or values.
template <class S, class A = typename S::A>
__global__ void __launch_bounds__(kTileThreads)
    weigh_tiles(S of, Chunk c, const A* weights, int64_t ld, At<const A> keys, int64_t size, At<A> to) {
  const int64_t columns = (size + kTile - 1) / kTile, tiles = c.batches * of.heads * of.query_tiles * columns;
  for (int64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
    const Quotient by_column = divided(t, columns), by_queries = divided(by_column.quotient, of.query_tiles),
                   by_head = divided(by_queries.quotient, of.heads);
    const int64_t batch = by_head.quotient, head = by_head.rest, first = by_queries.rest * kTile, rows = c.queries - first,
                  column = by_column.rest * kTile;
    const A* const w = weights + ((batch * of.heads + head) * c.queries + first) * ld;
    const A* const k = keys.head(c.outer, c.first_batch + batch, head / (of.heads / of.kv_heads)) + column;
    A sums[kMicro][kMicro] = {};
    for (int64_t j = 0; j < of.key_tiles; j++) {
      if (!of.reached(batch, head, by_queries.rest, j)) continue;
      const int64_t key = j * kTile, depth = of.keys - key < kTile ? of.keys - key : kTile;
      add_products<true, false>(
          sums, depth, shared<A>(), [&](int64_t e, int64_t m) { return m < rows ? w[m * ld + key + e] : A(0); },
          [&](int64_t e, int64_t n) { return column + n < size ? k[(key + e) * keys.at.row + n] : A(0); });
    }
    auto begin = [&](int64_t m) -> A* {
      if (m >= rows) return nullptr;
      const ScoreRow row = of.row(c, (batch * of.heads + head) * c.queries + first + m);
      return of.computes(row) ? to.data + S::offset(row, to.at) + column : nullptr;
    };
    put_sums(sums, size - column, begin, [](A& element, A sum) { element = sum; });
  }
}
// The other way: for each key what the queries of all heads that share it have, in their order.
template <class S, class A = typename S::A>
__global__ void __launch_bounds__(kTileThreads)
    gather_tiles(S of, Chunk c, const A* weights, int64_t ld, At<const A> queries, int64_t size, At<A> to, bool first) {
  const int64_t columns = (size + kTile - 1) / kTile, tiles = c.batches * of.kv_heads * of.key_tiles * columns,
                group = of.heads / of.kv_heads;
  for (int64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
    const Quotient by_column = divided(t, columns), by_keys = divided(by_column.quotient, of.key_tiles),
                   by_head = divided(by_keys.quotient, of.kv_heads);
    const int64_t batch = by_head.quotient, kv_head = by_head.rest, key = by_keys.rest * kTile, keys = of.keys - key,
                  column = by_column.rest * kTile;
    A sums[kMicro][kMicro] = {};
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++)
      for (int64_t i = 0; i < of.query_tiles; i++) {
        if (!of.reached(batch, head, i, by_keys.rest)) continue;
        const int64_t query = i * kTile, depth = c.queries - query < kTile ? c.queries - query : kTile;
        const A* const w = weights + ((batch * of.heads + head) * c.queries + query) * ld + key;
        const A* const q = queries.head(c.outer, c.first_batch + batch, head) + (c.first_query + query) * queries.at.row + column;
        add_products<false, false>(
            sums, depth, shared<A>(), [&](int64_t e, int64_t m) { return m < keys ? w[e * ld + m] : A(0); },
            [&](int64_t e, int64_t n) { return column + n < size ? q[e * queries.at.row + n] : A(0); });
      }
    A* const here = to.head(c.outer, c.first_batch + batch, kv_head) + key * to.at.row + column;
    put_sums(
        sums, size - column, [&](int64_t m) { return m < keys ? here + m * to.at.row : nullptr; },
        [&](A& element, A sum) { element = first ? sum : element + sum; });
  }
}

template <class T>
struct ByTiles {
  using A = Acc<T>;
  using Of = Scores<T, Sparse>;
  using Call = SparsePattern;
  const AttentionProblem& p;
  const SparsePattern& s;
  const Workspace& workspace;
  Sizes sizes;
  int32_t* counts;
  uint8_t* tiles;

  static bool hides(const AttentionProblem&, const Call&) { return true; }
  static int64_t bytes(const AttentionProblem& p, const Part& part, const Call& s) {
    const Sizes sizes(p, part, s);
    return checked_add(piece_bytes<int32_t>(sizes.counts), piece_bytes<uint8_t>(sizes.tiles));
  }
  ByTiles(const AttentionProblem& problem, const Part& part, const Call& pattern, Workspace& from)
      : p(problem),
        s(pattern),
        workspace(from),
        sizes(p, part, s),
        counts(take<int32_t>(from, sizes.counts)),
        tiles(take<uint8_t>(from, sizes.tiles)) {}
  void describe(Of& of) const {
    Sparse& t = of;
    t = {}, t.kind = s.kind, t.all_batches = p.batch, t.all_keys = p.keys;
    t.counts = counts, t.block = s.block, t.table_heads = p.heads, t.rows = sizes.rows, t.blocks = sizes.blocks;
    t.tokens = s.tokens, t.half = s.half, t.tiles = tiles, t.tile_heads = sizes.tile_heads, t.key_tiles = sizes.key_tiles;
  }
  void begin(const Chunk& c, Of& of) const {
    Sparse& t = of;
    t.first_batch = c.first_batch, t.first_query = c.first_query, t.query_tiles = ceil_div(c.queries, kTile);
    if (s.kind == SparsePattern::Kind::blocks) {
      t.first_row = c.first_query / s.block;
      count_listed(p, s, c, t, counts, workspace);
    }
    mark_tiles(c, t, tiles, workspace);
  }
  void multiply_rows(const Of& of, const Chunk& c, const T* of_queries, const AttentionStrides& queries_at, const T* of_keys,
                     const AttentionStrides& keys_at, int64_t size, A* to) const {
    launch(scores_of_tiles<Of>, {blocks_for(c.batches * p.heads * of.query_tiles * of.key_tiles)}, kTileThreads, kTileBytes<A>,
           workspace, kWhat, of, c, At<const T>{of_queries, queries_at}, At<const T>{of_keys, keys_at}, size, to,
           row_of_scores(p));
  }
  void weigh(const Of& of, const Chunk& c, const A* weights, const A* of_keys, const AttentionStrides& keys_at, int64_t size,
             A* to, const AttentionStrides& at) const {
    if (size == 0) return;
    launch(weigh_tiles<Of>, {blocks_for(c.batches * p.heads * of.query_tiles * ceil_div(size, kTile))}, kTileThreads,
           kTileBytes<A>, workspace, kWhat, of, c, weights, row_of_scores(p), At<const A>{of_keys, keys_at}, size, At<A>{to, at});
  }
  void gather(const Of& of, const Chunk& c, const A* weights, const A* from, const AttentionStrides& from_at, int64_t size, A* to,
              const AttentionStrides& at, bool first) const {
    launch(gather_tiles<Of>, {blocks_for(c.batches * p.kv_heads * of.key_tiles * ceil_div(size, kTile))}, kTileThreads,
           kTileBytes<A>, workspace, kWhat, of, c, weights, row_of_scores(p), At<const A>{from, from_at}, size, At<A>{to, at},
           first);
  }
};

// A pattern's parameters are no dense call's.
template <class Operands>
Operands without_own(Operands m) {
  for (Operand& t : m.own) t = {};
  return m;
}
AttentionGradients gradients_without_own(const AttentionGradients& m) {
  AttentionGradients g = without_own(m);
  for (Operand& t : g.grad_own) t = {};
  return g;
}
// Parts follow each other on one stream, and in the same memory: what the largest takes, and each in its turn.
int64_t most(int count, const auto& bytes) {
  int64_t most = 0;
  for (int i = 0; i < count; i++) {
    const int64_t here = bytes(i);
    if (here > most) most = here;
  }
  return most;
}
void in_turn(int count, Workspace& workspace, const auto& body) {
  const int64_t begin = workspace.used;
  int64_t end = begin;
  for (int i = 0; i < count; i++) {
    workspace.used = begin;
    body(i);
    if (workspace.used > end) end = workspace.used;
  }
  workspace.used = end;
}

}  // namespace

int64_t sparse_workspace(const SparsePart* parts, int count) {
  const AttentionProblem& p = *parts->p;
  if (p.keys == 0) return 0;
  return checked_add(most(count, [&](int i) { return attend_into_bytes<ByTiles>(*parts[i].p, *parts[i].s); }),
                     with_type(p.dtype, [&]<class T>() { return output_bytes<T>(p); }));
}
void attend_sparse(const SparsePart* parts, const AttentionOperands* operands, int count, Workspace& workspace) {
  with_type(parts->p->dtype, [&]<class T>() {
    attend_by<T>(*parts->p, without_own(*operands), workspace, [&](Acc<T>* sums, const AttentionStrides& at) {
      in_turn(count, workspace,
              [&](int i) { attend_into<T, ByTiles>(*parts[i].p, without_own(operands[i]), sums, at, workspace, *parts[i].s); });
    });
  });
}

namespace {

template <class A>
void clear(A* data, int64_t count, const Workspace& workspace) {
  for_each(count, workspace, kWhat, [=] __device__(int64_t i) { data[i] = 0; });
}
// Gradients of all parts, each once, and of how many elements.
template <class Body>
void each_gradient(const SparsePart* parts, const AttentionGradients* gradients, int count, const Body& body) {
  for (int i = 0; i < count; i++) {
    const AttentionProblem& p = *parts[i].p;
    auto own = [&](Operand AttentionGradients::*which, int64_t elements) {
      const Operand& to = gradients[i].*which;
      const bool shared = i > 0 && to && to.data == (gradients->*which).data;
      body(i, which, to, elements, shared);
    };
    own(&AttentionGradients::grad_query, checked_mul(query_rows(p), p.size));
    own(&AttentionGradients::grad_key, checked_mul(checked_mul(key_heads(p), p.keys), p.size));
    own(&AttentionGradients::grad_value, checked_mul(checked_mul(key_heads(p), p.keys), p.value_size));
  }
}

}  // namespace

int64_t sparse_backward_workspace(const SparsePart* parts, const AttentionGradients* gradients, int count) {
  return with_type(parts->p->dtype, [&]<class T>() {
    int64_t bytes = most(count, [&](int i) {
      return differentiate_bytes<ByTiles>(*parts[i].p, gradients_without_own(gradients[i]), *parts[i].s);
    });
    each_gradient(parts, gradients, count, [&](int, auto, const Operand& to, int64_t elements, bool shared) {
      if (!shared) bytes = checked_add(bytes, sums_bytes<T>(to, elements, 1));
    });
    return bytes;
  });
}
void differentiate_sparse(const SparsePart* parts, const AttentionGradients* gradients, int count, Workspace& workspace) {
  with_type(parts->p->dtype, [&]<class T>() {
    using A = Acc<T>;
    Sums<A> sums[2];
    each_gradient(parts, gradients, count, [&](int i, auto which, const Operand& to, int64_t elements, bool shared) {
      const bool of_key = which == &AttentionGradients::grad_key, of_query = which == &AttentionGradients::grad_query;
      auto place = [&](Sums<A>& of) -> A*& { return of_query ? of.query : of_key ? of.key : of.value; };
      A*& mine = place(sums[i]);
      mine = shared ? place(sums[0]) : sums_of<T>(to, elements, workspace);
      if (of_query && mine && !shared) clear(mine, elements, workspace);  // rows of other parts
      if (shared && !of_query) (of_key ? sums[i].adds_keys : sums[i].adds_values) = true;
    });
    in_turn(count, workspace, [&](int i) {
      differentiate_into<T, ByTiles>(*parts[i].p, gradients_without_own(gradients[i]), sums[i], workspace, *parts[i].s);
    });
    each_gradient(parts, gradients, count, [&](int i, auto which, const Operand& to, int64_t elements, bool shared) {
      const A* const from = which == &AttentionGradients::grad_query ? sums[i].query
                            : which == &AttentionGradients::grad_key ? sums[i].key
                                                                     : sums[i].value;
      if (!shared) store_sums<T>(from, to, elements, workspace);
    });
  });
}

int64_t token_bytes(const AttentionProblem& p) { return piece_bytes<Token>(checked_product({p.outer, p.batch, p.keys})); }
SparsePattern tokens_of(const AttentionProblem& p, const Operand* own, Workspace& workspace) {
  const int64_t all = p.outer * p.batch * p.keys;
  Token* const tokens = take<Token>(workspace, all);
  for_each(all, workspace, kWhat, [=, kinds = TokenKinds(p, own), keys = p.keys] __device__(int64_t i) {
    const Quotient by_batch = divided(i, keys);
    tokens[i] = kinds(by_batch.quotient, by_batch.rest);
  });
  SparsePattern s = band_of(p);
  s.tokens = tokens;
  return s;
}
int64_t list_bytes(const AttentionProblem& p) {
  const BigBirdLists lists(p, nullptr);
  return checked_add(piece_bytes<int64_t>(lists.rows()), piece_bytes<int64_t>(lists.indices()));
}
SparsePattern blocks_listed(const AttentionProblem& p, const Operand* own, Workspace& workspace) {
  const BigBirdLists lists(p, own);
  int64_t *const counts = take<int64_t>(workspace, lists.rows()), *const indices = take<int64_t>(workspace, lists.indices());
  for_each(lists.rows(), workspace, kWhat,
           [=] __device__(int64_t row) { counts[row] = lists.list(row, indices + row * lists.most); });
  return lists.pattern(p, counts, indices);
}

}  // namespace ai3::inline AI3_LEVEL

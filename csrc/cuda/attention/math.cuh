// Attention by its definition: all scores of some queries in the workspace, by cuBLAS, their softmax by a block of threads for
// each query, and the weighted sums of the values, by cuBLAS again. Weights and everything after them are float32 where tensors
// have 16 bits. Backward computes scores and weights again, from the log-sum-exp. What computes the products is a template's
// parameter: sparse.cu has one that leaves out what a pattern hides.
#pragma once
#include <optional>

#include "products.cuh"

namespace ai3::inline AI3_LEVEL {
namespace {

constexpr const char* kWhat = "attention's scores";

// Elements from one row of scores to the next: each begins at a multiple of 16 bytes.
inline int64_t row_of_scores(const AttentionProblem& p) { return round_up(p.keys, 4); }
// What goes through buffers of so many scores at once.
struct Part {
  int64_t batches, queries;
};
inline Part part_of(const AttentionProblem& p, int64_t buffers) {
  const int64_t accumulator = p.dtype == DType::f64 ? 8 : 4;
  const int64_t row = checked_product({buffers, accumulator, p.heads, row_of_scores(p)}), batch = checked_mul(row, p.queries);
  if (batch <= AI3_PATCH_BYTES) return {in_a_chunk(batch, p.batch), p.queries};
  return {1, in_a_chunk(row, p.queries)};
}
template <class Body>
void each_chunk(const AttentionProblem& p, const Part& part, const Body& body) {
  for (int64_t o = 0; o < p.outer; o++)
    for (int64_t b = 0; b < p.batch; b += part.batches)
      for (int64_t i = 0; i < p.queries; i += part.queries)
        body(Chunk{o, b, p.batch - b < part.batches ? p.batch - b : part.batches, i,
                   p.queries - i < part.queries ? p.queries - i : part.queries});
}
template <class T>
Rows<T> rows_of(const AttentionProblem& p, const T* data, const AttentionStrides& at, int64_t heads, int64_t rows, int64_t size) {
  return {data, at, p.outer * p.batch, heads, rows, size};
}
// A copy of them in the accumulator's type, contiguous.
template <class T>
Acc<T>* widened_rows(const Rows<T>& rows, int64_t outer_batch, Workspace& workspace) {
  Acc<T>* const to = take<Acc<T>>(workspace, rows.count() * rows.size);
  if (rows.count() > 0)
    launch(copy_rows<T, EveryRow>, {blocks_for_warps(rows.count())}, kRowThreads, 0, workspace, kWhat, rows, outer_batch,
           EveryRow{}, to, static_cast<int32_t*>(nullptr));
  return to;
}
// Where a chunk begins: in a tensor of queries or outputs, of keys or values.
inline int64_t begin_of(const Chunk& c, const AttentionStrides& s) {
  return c.outer * s.outer + c.first_batch * s.batch + c.first_query * s.row;
}
inline int64_t begin_of_keys(const Chunk& c, const AttentionStrides& s) { return c.outer * s.outer + c.first_batch * s.batch; }

struct NoPattern {};
// The products, by cuBLAS.
template <class T>
struct ByCublas {
  using A = Acc<T>;
  using Of = Scores<T>;
  using Call = NoPattern;
  const AttentionProblem& p;
  const Workspace& workspace;
  void* scratch;

  static bool hides(const AttentionProblem& p, const Call&) { return hides_some(p); }
  static int64_t bytes(const AttentionProblem&, const Part&, const Call&) { return cublas_workspace(); }
  ByCublas(const AttentionProblem& problem, const Part&, const Call&, Workspace& from)
      : p(problem), workspace(from), scratch(take<char>(from, cublas_workspace())) {}
  void describe(Of&) const {}
  void begin(const Chunk&, Of&) const {}

  // Buffers of a chunk's scores: products of the rows of two tensors, of which one has queries.
  void multiply_rows(const Of&, const Chunk& c, const T* of_queries, const AttentionStrides& queries_at, const T* of_keys,
                     const AttentionStrides& keys_at, int64_t size, A* to) const {
    const int64_t group = p.heads / p.kv_heads, ld = row_of_scores(p), head = c.queries * ld;
    if (size == 0) return for_each(c.batches * p.heads * head, workspace, kWhat, [=] __device__(int64_t i) { to[i] = 0; });
    const Gemm g = product(c.queries, p.keys, size, {of_queries + begin_of(c, queries_at), leading(queries_at.row, size)},
                           {of_keys + begin_of_keys(c, keys_at), leading(keys_at.row, size), true}, to, ld);
    multiply(p.dtype, dtype_of<A>, g, {c.batches, queries_at.batch, keys_at.batch, p.heads * head},
             {p.kv_heads, group * queries_at.head, keys_at.head, group * head}, {group, queries_at.head, 0, head}, scratch);
  }
  // Weights, or their gradients, times rows of keys or values: rows of queries.
  void weigh(const Of&, const Chunk& c, const A* weights, const A* of_keys, const AttentionStrides& keys_at, int64_t size, A* to,
             const AttentionStrides& at) const {
    const int64_t group = p.heads / p.kv_heads, ld = row_of_scores(p), head = c.queries * ld;
    const Gemm g =
        product(c.queries, size, p.keys, {weights, ld}, {of_keys + begin_of_keys(c, keys_at), leading(keys_at.row, size)},
                to + begin_of(c, at), leading(at.row, size));
    multiply(dtype_of<A>, dtype_of<A>, g, {c.batches, p.heads * head, keys_at.batch, at.batch},
             {p.kv_heads, group * head, keys_at.head, group * at.head}, {group, head, 0, at.head}, scratch);
  }
  // Weights, or their gradients, the other way: rows of queries or outputs, which lie in `from`, for each key. Adds what all
  // queries of the heads that share a head of keys have, in their order; `first`: to nothing.
  void gather(const Of&, const Chunk& c, const A* weights, const A* from, const AttentionStrides& from_at, int64_t size, A* to,
              const AttentionStrides& at, bool first) const {
    const int64_t group = p.heads / p.kv_heads, ld = row_of_scores(p), head = c.queries * ld;
    for (int64_t h = 0; h < group; h++) {
      const Gemm g = product(p.keys, size, c.queries, {weights + h * head, ld, true},
                             {from + begin_of(c, from_at) + h * from_at.head, leading(from_at.row, size)},
                             to + begin_of_keys(c, at), leading(at.row, size), !first || h > 0);
      multiply(dtype_of<A>, dtype_of<A>, g, {1, 0, 0, 0}, {c.batches, p.heads * head, from_at.batch, at.batch},
               {p.kv_heads, group * head, group * from_at.head, at.head}, scratch);
    }
  }
};

// Scores become weights, and what they were is the log-sum-exp.
template <class S>
__global__ void __launch_bounds__(kThreads)
    weights_of_rows(S of, Chunk chunk, typename S::A* scores, int64_t ld, typename S::A* logsumexp) {
  using A = typename S::A;
  constexpr A none = S::kHidden;
  A* const memory = shared<A>();
  const int64_t rows = chunk.batches * of.heads * chunk.queries;
  for (int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
    const ScoreRow row = of.row(chunk, r);
    A* const s = scores + r * ld;
    if (!of.computes(row)) continue;
    A most = none, total = 0, slope;
    for (int64_t j = row.first + threadIdx.x; j < row.end; j += kThreads) {
      if (!of.reaches(row, j)) continue;
      const A score = of.score(row, j, s[j], slope);
      s[j] = score, most = Largest()(most, score);
    }
    most = reduce<kThreads>(most, memory, Largest());
    const A shift = most == none ? A(0) : most;
    for (int64_t j = row.first + threadIdx.x; j < row.end; j += kThreads) {
      if (!of.reaches(row, j)) continue;
      const A weight = static_cast<A>(exp(s[j] - shift));
      s[j] = weight, total += weight;
    }
    total = reduce<kThreads>(total, memory, Sum());
    // A sink is one more logit of the sum.
    const A sink = of.sink(row), top = sink > most ? sink : shift, of_keys = total == 0 ? A(0) : static_cast<A>(exp(shift - top));
    const A sum = total * of_keys + (sink == none ? A(0) : static_cast<A>(exp(sink - top)));
    const A share = total == 0 ? A(0) : of_keys / sum;
    const auto kept = of.kept(row);
    for (int64_t j = threadIdx.x; j < of.keys; j += kThreads)
      if (of.reaches(row, j)) s[j] = j >= row.first && j < row.end ? s[j] * share * kept(j) : A(0);
    if (logsumexp && threadIdx.x == 0) logsumexp[row.number] = sum == 0 ? none : top + static_cast<A>(log(sum));
  }
}

// What backward takes beside scores, and of each row.
template <class T>
struct Backward {
  using A = Acc<T>;
  const T *output, *grad_output;
  AttentionStrides at;
  int64_t size;
  const A* logsumexp;
  A *of_sink, *of_slope, *of_position;  // null where not wanted; the last as scores are
  T *rel_h, *rel_w;
  int64_t height, width;
};
// Scores become weights, and the weights' gradients those of the products of queries and keys.
template <class S, class T = typename S::Element>
__global__ void __launch_bounds__(kThreads)
    gradients_of_rows(S of, Chunk chunk, Backward<T> m, Acc<T>* scores, Acc<T>* gradients, int64_t ld) {
  using A = Acc<T>;
  constexpr A none = S::kHidden;
  A* const memory = shared<A>();
  const int64_t rows = chunk.batches * of.heads * chunk.queries;
  for (int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
    const ScoreRow row = of.row(chunk, r);
    A *const s = scores + r * ld, *const g = gradients + r * ld,
             *const positions = m.of_position ? m.of_position + r * ld : nullptr;
    if (!of.computes(row)) {
      for (int64_t j = threadIdx.x; j < of.keys; j += kThreads)
        if (of.reaches(row, j)) s[j] = g[j] = 0;
      continue;
    }
    const T *const y = m.output + S::offset(row, m.at), *const gy = m.grad_output + S::offset(row, m.at);
    A delta = 0, of_slope = 0;
    for (int64_t c = threadIdx.x; c < m.size; c += kThreads) delta += load_acc(y + c) * load_acc(gy + c);
    delta = reduce<kThreads>(delta, memory, Sum());
    const A logsumexp = m.logsumexp[row.number], shift = logsumexp == none ? A(0) : logsumexp;
    const auto kept = of.kept(row);
    for (int64_t j = threadIdx.x; j < of.keys; j += kThreads) {
      if (!of.reaches(row, j)) continue;
      A slope = 0, weight = 0, gradient = 0;
      const A score = j >= row.first && j < row.end ? of.score(row, j, s[j], slope) : none;
      if (score != none) {
        const A keep = kept(j);
        weight = static_cast<A>(exp(score - shift));
        gradient = weight * (g[j] * keep - delta), weight *= keep;
        of_slope -= of.distance(row, j) * gradient;
      }
      if (positions) positions[j] = gradient;
      s[j] = weight, g[j] = gradient * slope;
    }
    if (m.of_slope) {
      of_slope = reduce<kThreads>(of_slope, memory, Sum());
      if (threadIdx.x == 0) m.of_slope[row.number] = of_slope;
    }
    const A sink = of.sink(row);
    if (m.of_sink && threadIdx.x == 0) m.of_sink[row.number] = sink == none ? A(0) : -static_cast<A>(exp(sink - shift)) * delta;
    if (!positions) continue;
    __syncthreads();
    for (int64_t i = threadIdx.x; m.rel_h && i < m.height; i += kThreads) {
      A sum = 0;
      for (int64_t j = i * m.width; j < (i + 1) * m.width; j++) sum += positions[j];
      store_acc(m.rel_h + row.number * m.height + i, sum);
    }
    for (int64_t i = threadIdx.x; m.rel_w && i < m.width; i += kThreads) {
      A sum = 0;
      for (int64_t j = i; j < of.keys; j += m.width) sum += positions[j];
      store_acc(m.rel_w + row.number * m.width + i, sum);
    }
  }
}
// The gradient of a number that each head has: the sum of those of its rows.
template <class T>
__global__ void __launch_bounds__(kThreads)
    sums_of_heads(int64_t batches, int64_t heads, int64_t queries, const Acc<T>* of_rows, T* to) {
  Acc<T>* const memory = shared<Acc<T>>();
  for (int64_t h = blockIdx.x; h < heads; h += gridDim.x) {
    Acc<T> sum = 0;
    for (int64_t b = 0; b < batches; b++)
      for (int64_t i = threadIdx.x; i < queries; i += kThreads) sum += of_rows[(b * heads + h) * queries + i];
    sum = reduce<kThreads>(sum, memory, Sum());
    if (threadIdx.x == 0) store_acc(to + h, sum);
  }
}

template <class T>
constexpr bool kWidens = sizeof(T) != sizeof(Acc<T>);
inline int64_t query_rows(const AttentionProblem& p) { return checked_product({p.outer, p.batch, p.heads, p.queries}); }
inline int64_t key_heads(const AttentionProblem& p) { return checked_product({p.outer, p.batch, p.kv_heads}); }
inline int64_t sum_of(std::initializer_list<int64_t> sizes) {
  int64_t sum = 0;
  for (const int64_t size : sizes) sum = checked_add(sum, size);
  return sum;
}
inline int64_t scores_in(const AttentionProblem& p, const Part& part) {
  return checked_product({part.batches, p.heads, part.queries, row_of_scores(p)});
}

template <template <class> class By = ByCublas, class Call = NoPattern>
int64_t attend_into_bytes(const AttentionProblem& p, const Call& call = {}) {
  return with_type(p.dtype, [&]<class T>() {
    const Part part = part_of(p, 1);
    return sum_of({By<T>::bytes(p, part, call), piece_bytes<Acc<T>>(scores_in(p, part)),
                   Weighted<T>::bytes(key_heads(p), p.keys, p.value_size, By<T>::hides(p, call))});
  });
}
// Outputs in the accumulator's type, and the log-sum-exp of each row.
template <class T, template <class> class By = ByCublas>
void attend_into(const AttentionProblem& p, const AttentionOperands& m, Acc<T>* sums, const AttentionStrides& at,
                 Workspace& workspace, const typename By<T>::Call& call = {}) {
  using A = Acc<T>;
  using S = typename By<T>::Of;
  S scores_of(p, m.mask, m.own, m.dropout_seed);
  const Part part = part_of(p, 1);
  const bool hides = By<T>::hides(p, call);
  const By<T> by(p, part, call, workspace);
  by.describe(scores_of);
  A* const scores = take<A>(workspace, scores_in(p, part));
  const Weighted<T> values(rows_of(p, m.value.read<T>(), p.value_at, p.kv_heads, p.keys, p.value_size), p.batch, hides, workspace,
                           kWhat);
  each_chunk(p, part, [&](const Chunk& c) {
    const int64_t blocks = blocks_for(c.batches * p.heads * c.queries);
    by.begin(c, scores_of);
    by.multiply_rows(scores_of, c, m.query.read<T>(), p.query_at, m.key.read<T>(), p.key_at, p.size, scores);
    launch(weights_of_rows<S>, {blocks}, kThreads, reduce_bytes<A>(kThreads), workspace, kWhat, scores_of, c, scores,
           row_of_scores(p), m.logsumexp.write<A>());
    by.weigh(scores_of, c, scores, values.data, values.at, p.value_size, sums, at);
    if (hides)
      launch(add_unclean<S>, {blocks}, kRowThreads, 0, workspace, kWhat, scores_of, c, scores, row_of_scores(p), values, sums,
             at);
  });
}

template <class T>
int64_t output_bytes(const AttentionProblem& p) {
  return kWidens<T> ? piece_bytes<Acc<T>>(checked_mul(query_rows(p), p.value_size)) : 0;
}
// into(sums, how they lie), and what that makes as elements.
template <class T, class Into>
void attend_by(const AttentionProblem& p, const AttentionOperands& m, Workspace& workspace, const Into& into) {
  using A = Acc<T>;
  const int64_t rows = query_rows(p);
  T* const y = m.output.write<T>();
  auto store = [&](const A* from) {
    store_rows<T>(from, rows, p.batch, p.heads, p.queries, p.value_size, y, p.output_at, workspace, kWhat);
  };
  if (p.keys == 0) {  // zeros, but of a log-sum-exp of sinks
    using S = Scores<T>;
    store(nullptr);
    each_chunk(p, {p.batch, p.queries}, [&](const Chunk& c) {
      launch(weights_of_rows<S>, {blocks_for(c.batches * p.heads * c.queries)}, kThreads, reduce_bytes<A>(kThreads), workspace,
             kWhat, S(p, m.mask, m.own, m.dropout_seed), c, static_cast<A*>(nullptr), int64_t{0}, m.logsumexp.write<A>());
    });
    return;
  }
  if constexpr (kWidens<T>) {
    A* const sums = take<A>(workspace, rows * p.value_size);
    into(sums, rows_of(p, y, {}, p.heads, p.queries, p.value_size).dense(p.batch));
    store(sums);
  } else {
    into(y, p.output_at);
  }
}
inline int64_t attend_bytes(const AttentionProblem& p) {
  if (p.keys == 0) return 0;
  return checked_add(attend_into_bytes(p), with_type(p.dtype, [&]<class T>() { return output_bytes<T>(p); }));
}
template <class T>
void attend(const AttentionProblem& p, const AttentionOperands& m, Workspace& workspace) {
  attend_by<T>(p, m, workspace, [&](Acc<T>* sums, const AttentionStrides& at) { attend_into<T>(p, m, sums, at, workspace); });
}

// ---- Gradients
// Buffers of backward's scores: those, their gradients, and what the gradients of rel_h and rel_w are sums of.
inline int64_t buffers_of(const AttentionGradients& m) { return m.grad_own[Dense::rel_h] || m.grad_own[Dense::rel_w] ? 3 : 2; }
// Elements of a gradient's sums of their own, where it has 16 bits.
template <class T>
int64_t sums_bytes(const Operand& gradient, int64_t rows, int64_t size) {
  return gradient && kWidens<T> ? piece_bytes<Acc<T>>(checked_mul(rows, size)) : 0;
}
// Rows as a product reads them.
template <class A>
struct Lying {
  const A* data;
  AttentionStrides at;
};
template <template <class> class By = ByCublas, class Call = NoPattern>
int64_t differentiate_bytes(const AttentionProblem& p, const AttentionGradients& m, const Call& call = {}) {
  return with_type(p.dtype, [&]<class T>() {
    using A = Acc<T>;
    const Part part = part_of(p, buffers_of(m));
    const bool hides = By<T>::hides(p, call);
    const int64_t queries = query_rows(p), heads = key_heads(p), query_heads = checked_product({p.outer, p.batch, p.heads});
    int64_t bytes = checked_add(By<T>::bytes(p, part, call), checked_mul(buffers_of(m), piece_bytes<A>(scores_in(p, part))));
    if (m.grad_query) bytes = checked_add(bytes, Weighted<T>::bytes(heads, p.keys, p.size, hides));
    auto of_queries = [&](int64_t size) {
      return hides ? piece_bytes<A>(checked_mul(queries, size)) : Weighted<T>::bytes(query_heads, p.queries, size, false);
    };
    if (m.grad_key) bytes = checked_add(bytes, of_queries(p.size));
    if (m.grad_value) bytes = checked_add(bytes, of_queries(p.value_size));
    for (const Dense::Place of_heads : {Dense::sinks, Dense::alibi_slopes})
      if (m.grad_own[of_heads]) bytes = checked_add(bytes, piece_bytes<A>(queries));
    return bytes;
  });
}

// Gradients, contiguous, in the accumulator's type; what is null is not wanted. `adds`: those of keys and values to what is
// there.
template <class A>
struct Sums {
  A *query = nullptr, *key = nullptr, *value = nullptr;
  bool adds_keys = false, adds_values = false;
};
template <class T, template <class> class By = ByCublas>
void differentiate_into(const AttentionProblem& p, const AttentionGradients& m, const Sums<Acc<T>>& sums, Workspace& workspace,
                        const typename By<T>::Call& call = {}) {
  using A = Acc<T>;
  using S = typename By<T>::Of;
  const Part part = part_of(p, buffers_of(m));
  const bool hides = By<T>::hides(p, call);
  const T *const q = m.query.read<T>(), *const k = m.key.read<T>(), *const v = m.value.read<T>(),
                 *const gy = m.grad_output.read<T>();
  S scores_of(p, m.mask, m.own, m.dropout_seed);
  const By<T> by(p, part, call, workspace);
  by.describe(scores_of);
  A *const scores = take<A>(workspace, scores_in(p, part)), *const gradients = take<A>(workspace, scores_in(p, part));
  A* const of_position = buffers_of(m) == 3 ? take<A>(workspace, scores_in(p, part)) : nullptr;
  const A* const logsumexp = m.logsumexp.read<A>();
  std::optional<Weighted<T>> from_keys;
  if (sums.query && p.size > 0)
    from_keys.emplace(rows_of(p, k, p.key_at, p.kv_heads, p.keys, p.size), p.batch, hides, workspace, kWhat);
  auto of_queries = [&](const A* wanted, const T* data, const AttentionStrides& at, int64_t size) -> std::optional<Lying<A>> {
    if (!wanted || size == 0) return std::nullopt;
    const Rows<T> rows = rows_of(p, data, at, p.heads, p.queries, size);
    if (!hides) {
      const Weighted<T> wide(rows, p.batch, false, workspace, kWhat);
      return Lying<A>{wide.data, wide.at};
    }
    A* const to = take<A>(workspace, rows.count() * size);
    launch(copy_rows<T, RowsThatSee<S>>, {blocks_for_warps(rows.count())}, kRowThreads, 0, workspace, kWhat, rows, p.batch,
           RowsThatSee<S>{scores_of, logsumexp}, to, static_cast<int32_t*>(nullptr));
    return Lying<A>{to, rows.dense(p.batch)};
  };
  const auto from_queries = of_queries(sums.key, q, p.query_at, p.size),
             from_outputs = of_queries(sums.value, gy, p.output_at, p.value_size);
  auto of_heads = [&](Dense::Place place) { return m.grad_own[place] ? take<A>(workspace, query_rows(p)) : nullptr; };
  A *const of_sink = of_heads(Dense::sinks), *const of_slope = of_heads(Dense::alibi_slopes);
  const Backward<T> backward = {m.output.read<T>(),
                                gy,
                                p.output_at,
                                p.value_size,
                                logsumexp,
                                of_sink,
                                of_slope,
                                of_position,
                                m.grad_own[Dense::rel_h].write<T>(),
                                m.grad_own[Dense::rel_w].write<T>(),
                                p.keys / scores_of.width,
                                scores_of.width};
  auto dense = [&](int64_t heads, int64_t rows, int64_t size) {
    return rows_of<A>(p, nullptr, {}, heads, rows, size).dense(p.batch);
  };
  each_chunk(p, part, [&](const Chunk& c) {
    const bool first = c.first_query == 0;
    by.begin(c, scores_of);
    by.multiply_rows(scores_of, c, q, p.query_at, k, p.key_at, p.size, scores);
    by.multiply_rows(scores_of, c, gy, p.output_at, v, p.value_at, p.value_size, gradients);
    launch(gradients_of_rows<S>, {blocks_for(c.batches * p.heads * c.queries)}, kThreads, reduce_bytes<A>(kThreads), workspace,
           kWhat, scores_of, c, backward, scores, gradients, row_of_scores(p));
    if (from_outputs)
      by.gather(scores_of, c, scores, from_outputs->data, from_outputs->at, p.value_size, sums.value,
                dense(p.kv_heads, p.keys, p.value_size), first && !sums.adds_values);
    if (from_queries)
      by.gather(scores_of, c, gradients, from_queries->data, from_queries->at, p.size, sums.key,
                dense(p.kv_heads, p.keys, p.size), first && !sums.adds_keys);
    if (!from_keys) return;
    const AttentionStrides at = dense(p.heads, p.queries, p.size);
    by.weigh(scores_of, c, gradients, from_keys->data, from_keys->at, p.size, sums.query, at);
    if (hides)
      launch(add_unclean<S>, {blocks_for(c.batches * p.heads * c.queries)}, kRowThreads, 0, workspace, kWhat, scores_of, c,
             gradients, row_of_scores(p), *from_keys, sums.query, at);
  });
  auto sum_heads = [&](const A* of_rows, Dense::Place place) {
    if (of_rows)
      launch(sums_of_heads<T>, {blocks_for(p.heads)}, kThreads, reduce_bytes<A>(kThreads), workspace, kWhat, p.outer * p.batch,
             p.heads, p.queries, of_rows, m.grad_own[place].write<T>());
  };
  sum_heads(of_sink, Dense::sinks), sum_heads(of_slope, Dense::alibi_slopes);
}

// Where a gradient is summed: in itself, or apart where it has 16 bits, from which it is stored at last.
template <class T>
Acc<T>* sums_of(const Operand& gradient, int64_t count, Workspace& workspace) {
  if constexpr (kWidens<T>)
    return gradient ? take<Acc<T>>(workspace, count) : nullptr;
  else
    return gradient.write<T>();
}
template <class T>
void store_sums(const Acc<T>* sums, const Operand& gradient, int64_t count, const Workspace& workspace) {
  if (kWidens<T> && gradient) narrow_to(gradient.write<T>(), sums, count, workspace, kWhat);
}
inline int64_t math_backward_bytes(const AttentionProblem& p, const AttentionGradients& m) {
  return with_type(p.dtype, [&]<class T>() {
    const int64_t queries = query_rows(p), keys = checked_mul(key_heads(p), p.keys);
    return sum_of({differentiate_bytes(p, m), sums_bytes<T>(m.grad_query, queries, p.size),
                   sums_bytes<T>(m.grad_key, keys, p.size), sums_bytes<T>(m.grad_value, keys, p.value_size)});
  });
}
template <class T>
void differentiate(const AttentionProblem& p, const AttentionGradients& m, Workspace& workspace) {
  const int64_t queries = query_rows(p) * p.size, keys = key_heads(p) * p.keys;
  const Sums<Acc<T>> sums{sums_of<T>(m.grad_query, queries, workspace), sums_of<T>(m.grad_key, keys * p.size, workspace),
                          sums_of<T>(m.grad_value, keys * p.value_size, workspace)};
  differentiate_into<T>(p, m, sums, workspace);
  store_sums<T>(sums.query, m.grad_query, queries, workspace), store_sums<T>(sums.key, m.grad_key, keys * p.size, workspace);
  store_sums<T>(sums.value, m.grad_value, keys * p.value_size, workspace);
}

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

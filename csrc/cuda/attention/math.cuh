// Attention by its definition: all scores of some queries in the workspace, by cuBLAS, their softmax by a block of threads for
// each query, and the weighted sums of the values, by cuBLAS again. Weights and everything after them are float32 where tensors
// have 16 bits. Backward computes scores and weights again, from the log-sum-exp.
#pragma once
#include <optional>

#include "products.cuh"

namespace ai3::inline AI3_LEVEL {
namespace {

constexpr int kThreads = 128;
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
    launch(copy_rows<T>, {blocks_for_warps(rows.count())}, kRowThreads, 0, workspace, kWhat, rows, outer_batch, to,
           static_cast<int32_t*>(nullptr));
  return to;
}
// Where a chunk begins: in a tensor of queries or outputs, of keys or values.
inline int64_t begin(const Chunk& c, const AttentionStrides& s) {
  return c.outer * s.outer + c.first_batch * s.batch + c.first_query * s.row;
}
inline int64_t begin_of_keys(const Chunk& c, const AttentionStrides& s) { return c.outer * s.outer + c.first_batch * s.batch; }

// Buffers of a chunk's scores: products of the rows of two tensors, of which one has queries.
template <class T>
void multiply_rows(const AttentionProblem& p, const Chunk& c, const T* of_queries, const AttentionStrides& queries_at,
                   const T* of_keys, const AttentionStrides& keys_at, int64_t size, Acc<T>* to, void* scratch) {
  const int64_t group = p.heads / p.kv_heads, ld = row_of_scores(p), head = c.queries * ld;
  const Gemm g = product(c.queries, p.keys, size, {of_queries + begin(c, queries_at), leading(queries_at.row, size)},
                         {of_keys + begin_of_keys(c, keys_at), leading(keys_at.row, size), true}, to, ld);
  multiply(p.dtype, dtype_of<Acc<T>>, g, {c.batches, queries_at.batch, keys_at.batch, p.heads * head},
           {p.kv_heads, group * queries_at.head, keys_at.head, group * head}, {group, queries_at.head, 0, head}, scratch);
}
// Weights, or their gradients, times rows of keys or values: rows of queries.
template <class A>
void weigh(const AttentionProblem& p, const Chunk& c, const A* weights, const A* of_keys, const AttentionStrides& keys_at,
           int64_t size, A* to, const AttentionStrides& at, void* scratch) {
  const int64_t group = p.heads / p.kv_heads, ld = row_of_scores(p), head = c.queries * ld;
  const Gemm g =
      product(c.queries, size, p.keys, {weights, ld}, {of_keys + begin_of_keys(c, keys_at), leading(keys_at.row, size)},
              to + begin(c, at), leading(at.row, size));
  multiply(dtype_of<A>, dtype_of<A>, g, {c.batches, p.heads * head, keys_at.batch, at.batch},
           {p.kv_heads, group * head, keys_at.head, group * at.head}, {group, head, 0, at.head}, scratch);
}

// Weights, or their gradients, the other way: rows of queries or outputs, which lie in `from`, for each key. Adds what all
// queries of the heads that share a head of keys have, in their order; `first`: the first of a batch's chunks.
template <class A>
void gather(const AttentionProblem& p, const Chunk& c, const A* weights, const A* from, const AttentionStrides& from_at,
            int64_t size, A* to, const AttentionStrides& at, bool first, void* scratch) {
  const int64_t group = p.heads / p.kv_heads, ld = row_of_scores(p), head = c.queries * ld;
  for (int64_t h = 0; h < group; h++) {
    const Gemm g = product(p.keys, size, c.queries, {weights + h * head, ld, true},
                           {from + begin(c, from_at) + h * from_at.head, leading(from_at.row, size)}, to + begin_of_keys(c, at),
                           leading(at.row, size), !first || h > 0);
    multiply(dtype_of<A>, dtype_of<A>, g, {1, 0, 0, 0}, {c.batches, p.heads * head, from_at.batch, at.batch},
             {p.kv_heads, group * head, group * from_at.head, at.head}, scratch);
  }
}

// Scores become weights, and what they were is the log-sum-exp.
template <class T>
__global__ void __launch_bounds__(kThreads)
    weights_of_rows(Scores<T> of, Chunk chunk, Acc<T>* scores, int64_t ld, Acc<T>* logsumexp) {
  using A = Acc<T>;
  constexpr A none = Scores<T>::kHidden;
  A* const memory = shared<A>();
  const int64_t rows = chunk.batches * of.heads * chunk.queries;
  for (int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
    const ScoreRow row = of.row(chunk, r);
    A* const s = scores + r * ld;
    A most = none, total = 0, slope;
    for (int64_t j = row.first + threadIdx.x; j < row.end; j += kThreads) {
      const A score = of.score(row, j, s[j], slope);
      s[j] = score, most = Largest()(most, score);
    }
    most = reduce<kThreads>(most, memory, Largest());
    const A shift = most == none ? A(0) : most;
    for (int64_t j = row.first + threadIdx.x; j < row.end; j += kThreads) {
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
      s[j] = j >= row.first && j < row.end ? s[j] * share * kept(j) : A(0);
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
template <class T>
__global__ void __launch_bounds__(kThreads)
    gradients_of_rows(Scores<T> of, Chunk chunk, Backward<T> m, Acc<T>* scores, Acc<T>* gradients, int64_t ld) {
  using A = Acc<T>;
  constexpr A none = Scores<T>::kHidden;
  A* const memory = shared<A>();
  const int64_t rows = chunk.batches * of.heads * chunk.queries;
  for (int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
    const ScoreRow row = of.row(chunk, r);
    A *const s = scores + r * ld, *const g = gradients + r * ld,
             *const positions = m.of_position ? m.of_position + r * ld : nullptr;
    const T *const y = m.output + Scores<T>::offset(row, m.at), *const gy = m.grad_output + Scores<T>::offset(row, m.at);
    A delta = 0, of_slope = 0;
    for (int64_t c = threadIdx.x; c < m.size; c += kThreads) delta += load_acc(y + c) * load_acc(gy + c);
    delta = reduce<kThreads>(delta, memory, Sum());
    const A logsumexp = m.logsumexp[row.number], shift = logsumexp == none ? A(0) : logsumexp;
    const auto kept = of.kept(row);
    for (int64_t j = threadIdx.x; j < of.keys; j += kThreads) {
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

inline int64_t attend_bytes(const AttentionProblem& p) {
  if (p.keys == 0) return 0;
  return with_type(p.dtype, [&]<class T>() {
    return sum_of({cublas_workspace(), piece_bytes<Acc<T>>(scores_in(p, part_of(p, 1))),
                   Weighted<T>::bytes(key_heads(p), p.keys, p.value_size, hides_some(p)),
                   kWidens<T> ? piece_bytes<Acc<T>>(checked_mul(query_rows(p), p.value_size)) : 0});
  });
}

template <class T>
void attend(const AttentionProblem& p, const AttentionOperands& m, Workspace& workspace) {
  using A = Acc<T>;
  const Scores<T> scores_of(p, m.mask, m.own, m.dropout_seed);
  T* const y = m.output.write<T>();
  A* const logsumexp = m.logsumexp.write<A>();
  auto softmax = [&](const Chunk& c, A* scores) {
    launch(weights_of_rows<T>, {blocks_for(c.batches * p.heads * c.queries)}, kThreads, reduce_bytes<A>(kThreads), workspace,
           kWhat, scores_of, c, scores, row_of_scores(p), logsumexp);
  };
  if (p.keys == 0) {  // zeros, but of a log-sum-exp of sinks
    for_each(query_rows(p) * p.value_size, workspace, kWhat, [=, at = p.output_at, n = p.value_size] __device__(int64_t i) {
      const Quotient element = divided(i, n), query = divided(element.quotient, scores_of.queries),
                     head = divided(query.quotient, scores_of.heads), batch = divided(head.quotient, scores_of.batch);
      store_acc(y + batch.quotient * at.outer + batch.rest * at.batch + head.rest * at.head + query.rest * at.row + element.rest,
                A(0));
    });
    each_chunk(p, {p.batch, p.queries}, [&](const Chunk& c) { softmax(c, nullptr); });
    return;
  }
  const Part part = part_of(p, 1);
  const bool hides = hides_some(p);
  void* const scratch = take<char>(workspace, cublas_workspace());
  A* const scores = take<A>(workspace, scores_in(p, part));
  const T* const v = m.value.read<T>();
  const Weighted<T> values(rows_of(p, v, p.value_at, p.kv_heads, p.keys, p.value_size), p.batch, hides, workspace, kWhat);
  A* const sums = kWidens<T> ? take<A>(workspace, query_rows(p) * p.value_size) : reinterpret_cast<A*>(y);
  const AttentionStrides sums_at = kWidens<T> ? rows_of(p, y, {}, p.heads, p.queries, p.value_size).dense(p.batch) : p.output_at;
  each_chunk(p, part, [&](const Chunk& c) {
    if (p.size > 0)
      multiply_rows(p, c, m.query.read<T>(), p.query_at, m.key.read<T>(), p.key_at, p.size, scores, scratch);
    else
      for_each(scores_in(p, {c.batches, c.queries}), workspace, kWhat, [=] __device__(int64_t i) { scores[i] = 0; });
    softmax(c, scores);
    weigh(p, c, scores, values.data, values.at, p.value_size, sums, sums_at, scratch);
    if (hides)
      launch(add_unclean<T>, {blocks_for(c.batches * p.heads * c.queries)}, kRowThreads, 0, workspace, kWhat, scores_of, c,
             scores, row_of_scores(p), values, sums, sums_at);
  });
  if (kWidens<T>) store_rows<T>(sums, query_rows(p), p.batch, p.heads, p.queries, p.value_size, y, p.output_at, workspace, kWhat);
}

// ---- Gradients
// Buffers of backward's scores: those, their gradients, and what the gradients of rel_h and rel_w are sums of.
inline int64_t buffers_of(const AttentionGradients& m) { return m.grad_own[Dense::rel_h] || m.grad_own[Dense::rel_w] ? 3 : 2; }
// Elements of a gradient's sums of their own, where it has 16 bits.
template <class T>
int64_t sums_bytes(const Operand& gradient, int64_t rows, int64_t size) {
  return gradient && kWidens<T> ? piece_bytes<Acc<T>>(checked_mul(rows, size)) : 0;
}
inline int64_t differentiate_bytes(const AttentionProblem& p, const AttentionGradients& m) {
  return with_type(p.dtype, [&]<class T>() {
    using A = Acc<T>;
    const int64_t queries = query_rows(p), heads = key_heads(p), keys = checked_mul(heads, p.keys);
    const int64_t scores = piece_bytes<A>(scores_in(p, part_of(p, buffers_of(m))));
    int64_t bytes = sum_of({cublas_workspace(), checked_mul(buffers_of(m), scores), sums_bytes<T>(m.grad_query, queries, p.size),
                            sums_bytes<T>(m.grad_key, keys, p.size), sums_bytes<T>(m.grad_value, keys, p.value_size)});
    if (m.grad_query) bytes = checked_add(bytes, Weighted<T>::bytes(heads, p.keys, p.size, hides_some(p)));
    const int64_t query_heads = checked_product({p.outer, p.batch, p.heads});
    if (m.grad_key) bytes = checked_add(bytes, Weighted<T>::bytes(query_heads, p.queries, p.size, false));
    if (m.grad_value) bytes = checked_add(bytes, Weighted<T>::bytes(query_heads, p.queries, p.value_size, false));
    for (const Dense::Place of_heads : {Dense::sinks, Dense::alibi_slopes})
      if (m.grad_own[of_heads]) bytes = checked_add(bytes, piece_bytes<A>(queries));
    return bytes;
  });
}

template <class T>
void differentiate(const AttentionProblem& p, const AttentionGradients& m, Workspace& workspace) {
  using A = Acc<T>;
  const Part part = part_of(p, buffers_of(m));
  const bool hides = hides_some(p);
  const T *const q = m.query.read<T>(), *const k = m.key.read<T>(), *const v = m.value.read<T>(),
                 *const gy = m.grad_output.read<T>();
  const int64_t keys = key_heads(p) * p.keys;
  void* const scratch = take<char>(workspace, cublas_workspace());
  A *const scores = take<A>(workspace, scores_in(p, part)), *const gradients = take<A>(workspace, scores_in(p, part));
  A* const of_position = buffers_of(m) == 3 ? take<A>(workspace, scores_in(p, part)) : nullptr;
  // A gradient is contiguous, and so are its sums.
  auto sums = [&](const Operand& gradient, int64_t rows, int64_t size) {
    return gradient && kWidens<T> ? take<A>(workspace, rows * size) : gradient.write<A>();
  };
  A *const of_query = sums(m.grad_query, query_rows(p), p.size), *const of_key = sums(m.grad_key, keys, p.size),
           *const of_value = sums(m.grad_value, keys, p.value_size);
  auto widened = [&](const Operand& wanted, const T* data, const AttentionStrides& at, int64_t heads, int64_t rows, int64_t size,
                     bool may_hide) -> std::optional<Weighted<T>> {
    if (!wanted || size == 0) return std::nullopt;
    return Weighted<T>(rows_of(p, data, at, heads, rows, size), p.batch, may_hide, workspace, kWhat);
  };
  const auto from_keys = widened(m.grad_query, k, p.key_at, p.kv_heads, p.keys, p.size, hides),
             from_queries = widened(m.grad_key, q, p.query_at, p.heads, p.queries, p.size, false),
             from_outputs = widened(m.grad_value, gy, p.output_at, p.heads, p.queries, p.value_size, false);
  auto of_heads = [&](Dense::Place place) { return m.grad_own[place] ? take<A>(workspace, query_rows(p)) : nullptr; };
  A *const of_sink = of_heads(Dense::sinks), *const of_slope = of_heads(Dense::alibi_slopes);
  const Scores<T> scores_of(p, m.mask, m.own, m.dropout_seed);
  const Backward<T> backward = {m.output.read<T>(),
                                gy,
                                p.output_at,
                                p.value_size,
                                m.logsumexp.read<A>(),
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
    if (p.size > 0)
      multiply_rows(p, c, q, p.query_at, k, p.key_at, p.size, scores, scratch);
    else
      for_each(scores_in(p, {c.batches, c.queries}), workspace, kWhat, [=] __device__(int64_t i) { scores[i] = 0; });
    multiply_rows(p, c, gy, p.output_at, v, p.value_at, p.value_size, gradients, scratch);
    launch(gradients_of_rows<T>, {blocks_for(c.batches * p.heads * c.queries)}, kThreads, reduce_bytes<A>(kThreads), workspace,
           kWhat, scores_of, c, backward, scores, gradients, row_of_scores(p));
    if (from_outputs)
      gather(p, c, scores, from_outputs->data, from_outputs->at, p.value_size, of_value, dense(p.kv_heads, p.keys, p.value_size),
             first, scratch);
    if (from_queries)
      gather(p, c, gradients, from_queries->data, from_queries->at, p.size, of_key, dense(p.kv_heads, p.keys, p.size), first,
             scratch);
    if (!from_keys) return;
    const AttentionStrides at = dense(p.heads, p.queries, p.size);
    weigh(p, c, gradients, from_keys->data, from_keys->at, p.size, of_query, at, scratch);
    if (hides)
      launch(add_unclean<T>, {blocks_for(c.batches * p.heads * c.queries)}, kRowThreads, 0, workspace, kWhat, scores_of, c,
             gradients, row_of_scores(p), *from_keys, of_query, at);
  });
  auto store = [&](const A* from, const Operand& to, int64_t count) {
    if (kWidens<T> && to) narrow_to(to.write<T>(), from, count, workspace, kWhat);
  };
  store(of_query, m.grad_query, query_rows(p) * p.size), store(of_key, m.grad_key, keys * p.size);
  store(of_value, m.grad_value, keys * p.value_size);
  auto sum_heads = [&](const A* of_rows, Dense::Place place) {
    if (of_rows)
      launch(sums_of_heads<T>, {blocks_for(p.heads)}, kThreads, reduce_bytes<A>(kThreads), workspace, kWhat, p.outer * p.batch,
             p.heads, p.queries, of_rows, m.grad_own[place].write<T>());
  };
  sum_heads(of_sink, Dense::sinks), sum_heads(of_slope, Dense::alibi_slopes);
}

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

// Linformer (Wang et al. 2020): softmax(Q (E K)^T * scale) (F V). cuBLAS projects keys and values to fewer rows; attention over
// those is math.cuh's, in float32 where tensors have 16 bits.
#include "math.cuh"

namespace ai3::inline AI3_LEVEL {
namespace {

template <class T>
AttentionStrides dense(const AttentionProblem& p, int64_t heads, int64_t rows, int64_t size) {
  return rows_of<T>(p, nullptr, {}, heads, rows, size).dense(p.batch);
}
template <class T>
AttentionProblem over_projected(const AttentionProblem& p) {
  AttentionProblem inner = p;
  inner.dtype = dtype_of<Acc<T>>, inner.keys = p.projected, inner.parameters = {};
  inner.key_at = dense<T>(p, p.kv_heads, p.projected, p.size),
  inner.value_at = dense<T>(p, p.kv_heads, p.projected, p.value_size);
  if (kWidens<T>) {
    inner.query_at = dense<T>(p, p.heads, p.queries, p.size);
    inner.output_at = dense<T>(p, p.heads, p.queries, p.value_size);
  }
  return inner;
}
// A projection: one for all heads of key and value, or one for each.
template <class T>
struct Projection {
  const T* data;
  int64_t heads, head, row;
  explicit Projection(const Operand& t)
      : data(t.read<T>()), heads(t.rank == 3 ? t.sizes[0] : 1), head(stride_of(t, 2)), row(stride_of(t, 1)) {}
};
int64_t projected_bytes(const AttentionProblem& p, int64_t size) {
  return piece_bytes<char>(checked_product({p.dtype == DType::f64 ? 8 : 4, key_heads(p), p.projected, size}));
}

// to = E x of every head, contiguous.
template <class T>
void project(const AttentionProblem& p, const Operand& projection, const T* x, const AttentionStrides& at, int64_t size,
             Acc<T>* to, void* scratch, const Workspace& workspace) {
  if (p.keys == 0) return for_each(key_heads(p) * p.projected * size, workspace, kWhat, [=] __device__(int64_t i) { to[i] = 0; });
  const Projection<T> e(projection);
  const int64_t rows = p.projected * size;
  multiply(p.dtype, dtype_of<Acc<T>>,
           product(p.projected, size, p.keys, {e.data, leading(e.row, p.keys)}, {x, leading(at.row, size)}, to, leading(size, 1)),
           {p.outer, 0, at.outer, p.batch * p.kv_heads * rows}, {p.batch, 0, at.batch, p.kv_heads * rows},
           {p.kv_heads, e.head, at.head, rows}, scratch);
}

int64_t linformer_workspace(const AttentionProblem& p) {
  return with_type(p.dtype, [&]<class T>() {
    const AttentionProblem inner = over_projected<T>(p);
    const int64_t queries = query_rows(p);
    auto widened = [&](int64_t size) { return kWidens<T> ? piece_bytes<Acc<T>>(checked_mul(queries, size)) : 0; };
    return sum_of({cublas_workspace(), projected_bytes(p, p.size), projected_bytes(p, p.value_size), widened(p.size),
                   widened(p.value_size), attend_bytes(inner)});
  });
}
template <class T>
void attention_linformer(const AttentionProblem& p, const AttentionOperands& m, Workspace& workspace) {
  using A = Acc<T>;
  const AttentionProblem inner = over_projected<T>(p);
  void* const scratch = take<char>(workspace, cublas_workspace());
  A *const keys = take<A>(workspace, key_heads(p) * p.projected * p.size), *const values =
                                                                               take<A>(workspace,
                                                                                       key_heads(p) * p.projected * p.value_size);
  project(p, m.own[Linear::key_projection], m.key.read<T>(), p.key_at, p.size, keys, scratch, workspace);
  project(p, m.own[Linear::value_projection], m.value.read<T>(), p.value_at, p.value_size, values, scratch, workspace);
  AttentionOperands over{.query = m.query,
                         .key = keys,
                         .value = values,
                         .output = m.output,
                         .logsumexp = m.logsumexp,
                         .dropout_seed = m.dropout_seed};
  if constexpr (kWidens<T>) {
    over.query = widened_rows(rows_of(p, m.query.read<T>(), p.query_at, p.heads, p.queries, p.size), p.batch, workspace);
    over.output = take<A>(workspace, query_rows(p) * p.value_size);
  }
  attend<A>(inner, over, workspace);
  if constexpr (kWidens<T>)
    store_rows<T>(over.output.read<A>(), query_rows(p), p.batch, p.heads, p.queries, p.value_size, m.output.write<T>(),
                  p.output_at, workspace, kWhat);
}

// ---- Gradients
int64_t linformer_backward_workspace(const AttentionProblem& p, const AttentionGradients& m) {
  return with_type(p.dtype, [&]<class T>() {
    using A = Acc<T>;
    const AttentionProblem inner = over_projected<T>(p);
    const int64_t queries = query_rows(p), keys = checked_mul(key_heads(p), p.keys);
    const int64_t each = checked_mul(p.kv_heads, checked_mul(p.projected, p.keys));  // of a projection, at most
    int64_t bytes =
        sum_of({cublas_workspace(), checked_mul(2, projected_bytes(p, p.size)), checked_mul(2, projected_bytes(p, p.value_size)),
                math_backward_bytes(inner, {.grad_query = m.grad_query, .grad_key = &p, .grad_value = &p})});
    if (!kWidens<T>) return bytes;
    auto take = [&](int64_t times, int64_t rows, int64_t size) {
      bytes = checked_add(bytes, checked_mul(times, piece_bytes<A>(checked_mul(rows, size))));
    };
    take(2, queries, p.size), take(2, queries, p.value_size), take(2, keys, p.size), take(2, keys, p.value_size),
        take(4, each, 1);
    return checked_add(bytes, attend_bytes(inner));
  });
}
template <class T>
void differentiate_linformer(const AttentionProblem& p, const AttentionGradients& m, Workspace& workspace) {
  using A = Acc<T>;
  const AttentionProblem inner = over_projected<T>(p);
  const int64_t heads = key_heads(p);
  auto clear = [&](const Operand& to, int64_t count) {
    if (to) for_each(count, workspace, kWhat, [elements = to.write<T>()] __device__(int64_t i) { elements[i] = T{}; });
  };
  if (p.projected == 0) {
    clear(m.grad_query, query_rows(p) * p.size), clear(m.grad_key, heads * p.keys * p.size);
    return clear(m.grad_value, heads * p.keys * p.value_size);
  }
  void* const scratch = take<char>(workspace, cublas_workspace());
  auto of_projected = [&](int64_t size) { return take<A>(workspace, heads * p.projected * size); };
  A *const keys = of_projected(p.size), *const values = of_projected(p.value_size), *const grad_keys = of_projected(p.size),
           *const grad_values = of_projected(p.value_size);
  const Operand &e = m.own[Linear::key_projection], &f = m.own[Linear::value_projection];
  project(p, e, m.key.read<T>(), p.key_at, p.size, keys, scratch, workspace);
  project(p, f, m.value.read<T>(), p.value_at, p.value_size, values, scratch, workspace);
  AttentionGradients over{.grad_output = m.grad_output,
                          .query = m.query,
                          .key = keys,
                          .value = values,
                          .output = m.output,
                          .logsumexp = m.logsumexp,
                          .dropout_seed = m.dropout_seed,
                          .grad_query = m.grad_query,
                          .grad_key = grad_keys,
                          .grad_value = grad_values};
  if constexpr (kWidens<T>) {
    auto widened = [&](const Operand& t, const AttentionStrides& at, int64_t size) {
      return widened_rows(rows_of(p, t.read<T>(), at, p.heads, p.queries, size), p.batch, workspace);
    };
    over.query = widened(m.query, p.query_at, p.size), over.grad_output = widened(m.grad_output, p.output_at, p.value_size);
    // Before it was rounded: scores' gradients are differences of sums that are near each other.
    over.output = take<A>(workspace, query_rows(p) * p.value_size);
    attend<A>(inner, {.query = over.query, .key = keys, .value = values, .output = over.output, .dropout_seed = m.dropout_seed},
              workspace);
    if (m.grad_query) over.grad_query = take<A>(workspace, query_rows(p) * p.size);
  }
  differentiate<A>(inner, over, workspace);
  // What becomes a gradient, contiguous: sums of its own where that has 16 bits.
  auto make = [&](const Operand& to, int64_t count, const auto& body) {
    if (!to) return;
    A* const sums = kWidens<T> ? take<A>(workspace, count) : to.write<A>();
    body(sums);
    if (kWidens<T>) narrow_to(to.write<T>(), sums, count, workspace, kWhat);
  };
  if constexpr (kWidens<T>)
    if (m.grad_query) narrow_to(m.grad_query.write<T>(), over.grad_query.read<A>(), query_rows(p) * p.size, workspace, kWhat);
  auto lead_back = [&](const Operand& projection, const A* of_rows, const T* x, const AttentionStrides& at, int64_t size,
                       const Operand& to, const Operand& to_projection) {
    if (size == 0) return clear(to_projection, Projection<T>(projection).heads * p.projected * p.keys);
    const Projection<T> by(projection);
    const int64_t rows = p.projected * size, each = p.projected * p.keys;
    make(to, heads * p.keys * size, [&](A* sums) {  // E^T of_rows
      const Rows<T> lying = {by.data, {0, 0, by.head, by.row}, 1, by.heads, p.projected, p.keys};
      const A* const wide = kWidens<T> ? widened_rows(lying, 1, workspace) : reinterpret_cast<const A*>(by.data);
      const int64_t head = kWidens<T> ? (by.heads == 1 ? 0 : each) : by.head, row = kWidens<T> ? p.keys : by.row;
      multiply(dtype_of<A>, dtype_of<A>,
               product(p.keys, size, p.projected, {wide, leading(row, p.keys), true}, {of_rows, size}, sums, size), {1, 0, 0, 0},
               {p.outer * p.batch, 0, p.kv_heads * rows, p.kv_heads * p.keys * size}, {p.kv_heads, head, rows, p.keys * size},
               scratch);
    });
    make(to_projection, by.heads * each, [&](A* sums) {  // of_rows x^T, summed over what it serves, in that order
      const Weighted<T> wide(rows_of(p, x, at, p.kv_heads, p.keys, size), p.batch, false, workspace, kWhat);
      const int64_t shared = by.heads == 1 ? p.kv_heads : 1;
      for (int64_t b = 0; b < p.outer * p.batch; b++)
        for (int64_t h = 0; h < shared; h++) {
          const A* const rows_of_x = wide.data + b / p.batch * wide.at.outer + b % p.batch * wide.at.batch + h * wide.at.head;
          multiply(dtype_of<A>, dtype_of<A>,
                   product(p.projected, p.keys, size, {of_rows + (b * p.kv_heads + h) * rows, size},
                           {rows_of_x, leading(wide.at.row, size), true}, sums, p.keys, b + h > 0),
                   {1, 0, 0, 0}, {1, 0, 0, 0}, {by.heads, rows, wide.at.head, each}, scratch);
        }
    });
  };
  lead_back(e, grad_keys, m.key.read<T>(), p.key_at, p.size, m.grad_key, m.grad_own[Linear::key_projection]);
  lead_back(f, grad_values, m.value.read<T>(), p.value_at, p.value_size, m.grad_value, m.grad_own[Linear::value_projection]);
}
void linformer_backward(const AttentionProblem& p, const AttentionGradients& m, Workspace& workspace) {
  with_type(p.dtype, [&]<class T>() { differentiate_linformer<T>(p, m, workspace); });
}
GradientNames linformer_gradients(const AttentionProblem&) { return {"linformer", "linformer"}; }

bool linformer_supports(const AttentionProblem& p, Reason& reason) {
  return device_supports(p, reason) && projections_fit(p, reason) &&
         cublas_supports({p.queries, p.keys, p.size, p.value_size, p.projected}, reason);
}

AI3_ALGORITHM(attention, linformer, .accuracy = Accuracy::approximate, .supports = linformer_supports,
              .workspace = linformer_workspace, .gradients = linformer_gradients, .backward = linformer_backward,
              .backward_workspace = linformer_backward_workspace, .parameters = "Tensor key_projection, Tensor value_projection")

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

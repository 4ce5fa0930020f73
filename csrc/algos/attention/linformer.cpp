// Attention over projected keys and values (Wang et al., "Linformer", 2020): softmax(Q (E K)^T * scale) (F V), with E and F
// (projected, keys), or that for each head of key and value. The two products shorten keys and values; what follows is attention
// in tiles over the few rows that are left (flash.h), so that time and memory are linear in the number of keys.
//
// Rows of a product's result are the lanes of a panel of its left operand, as queries are of flash's scores: flash's second
// product, of weights with values, is this one with E's elements as weights.
#include "flash.h"
#include "tiles.h"

namespace ai3::inline AI3_LEVEL {
namespace {

constexpr int key_projection = Linear::key_projection, value_projection = Linear::value_projection;

// Attention itself is computed in the accumulator's type, in which the projected rows are.
template <class T>
inline constexpr bool kWidens = sizeof(T) != sizeof(Acc<T>);

// Rows of heads that lie one behind the other.
AI3_INLINE AttentionStrides dense(const AttentionProblem& p, int64_t heads, int64_t rows, int64_t size) {
  return {p.batch * heads * rows * size, heads * rows * size, rows * size, size};
}
AI3_INLINE int64_t elements(const AttentionProblem& p, int64_t heads, int64_t rows, int64_t size) {
  return checked_product({p.outer, p.batch, heads, rows, size});
}
template <class T>
AttentionProblem over_projected(const AttentionProblem& p) {
  AttentionProblem inner = p;
  inner.dtype = sizeof(Acc<T>) == 8 ? DType::f64 : DType::f32;
  inner.keys = p.projected, inner.parameters = {};
  inner.key_at = dense(p, p.kv_heads, p.projected, p.size);
  inner.value_at = dense(p, p.kv_heads, p.projected, p.value_size);
  if (kWidens<T>) {
    inner.query_at = dense(p, p.heads, p.queries, p.size);
    inner.output_at = dense(p, p.heads, p.queries, p.value_size);
  }
  return inner;
}

// One head of key and value, of one batch.
struct KeyHead {
  int64_t outer, batch, head;
  AI3_INLINE KeyHead(const AttentionProblem& p, int64_t index)
      : outer(index / (p.batch * p.kv_heads)), batch(index / p.kv_heads % p.batch), head(index % p.kv_heads) {}
  AI3_INLINE int64_t of(const AttentionStrides& s) const { return outer * s.outer + batch * s.batch + head * s.head; }
};
// A projection, as its heads and rows lie; rows are contiguous.
template <class T>
struct Projection {
  const T* data;
  int64_t head, row;
  explicit Projection(const Operand& t) : data(t.read<T>()), head(stride_of(t, 2)), row(stride_of(t, 1)) {}
};

// ---- Products ----------------------------------------------------------------------------------------------------------------
// What a thread works in.
template <class A>
struct Place {
  A *panel, *sums, *rows;  // kKeys rows of lanes; a row for each lane; kKeys rows that are not read in place
  static int64_t bytes(int64_t size) {
    return cut_size<A>({kKeys * kPanel<A>, checked_mul(kPanel<A>, padded<A>(size)), checked_mul(kKeys, padded<A>(size))});
  }
  Place(A* all, int64_t size) {
    Cut<A> cut{all};
    panel = cut.take(kKeys * kPanel<A>), sums = cut.take(kPanel<A> * padded<A>(size)), rows = cut.take(kKeys * padded<A>(size));
  }
};
// sums[lane] = sum of panel[row][lane] * from[row]; pack(first, count) fills the panel for some of the rows.
template <class T, class Pack>
void sum_rows(int64_t lanes, const T* from, int64_t stride, int64_t count, int64_t size, const Place<Acc<T>>& place,
              const Pack& pack) {
  using A = Acc<T>;
  for (int64_t i = 0; i < kPanel<A> * padded<A>(size); i += Vec<A>::width) store(place.sums + i, Vec<A>(A(0)));
  for (int64_t j = 0; j < count; j += kKeys) {
    const int64_t rows = smaller(kKeys, count - j);
    pack(j, rows);
    add_weighted(lanes, place.panel, rows_at(from + j * stride, stride, rows, size, true, place.rows), rows, size, place.sums);
  }
}

// A call's numbers, and what each thread works in.
template <class T>
struct Linformer {
  using A = Acc<T>;
  static constexpr int64_t P = kPanel<A>;
  const AttentionProblem& p;
  A* all;
  int64_t own = own_size(p);

  static int64_t own_size(const AttentionProblem& p) {
    const int64_t size = larger(p.size, p.value_size);
    const int64_t products = Place<A>::bytes(size);
    const int64_t of_projections =
        cut_size<A>({checked_mul(size, P), kKeys * P, kKeys * P, checked_mul(kKeys, padded<A>(size)), kKeys});
    return larger(products, of_projections);
  }

  // to = E x of every head, contiguous.
  void project(const Operand& projection, const T* x, const AttentionStrides& x_at, int64_t size, A* to) const {
    const Projection<T> of(projection);
    const int64_t panels = ceil_div(p.projected, P);
    parallel_for(p.threads, p.outer * p.batch * p.kv_heads * panels, [&](int64_t n, int thread) {
      const Place<A> place(all + thread * own, size);
      const KeyHead at(p, n / panels);
      const int64_t first = n % panels * P, lanes = smaller(P, p.projected - first);
      const T* const e = of.data + at.head * of.head + first * of.row;
      sum_rows(lanes, x + at.of(x_at), x_at.row, p.keys, size, place,
               [&](int64_t j, int64_t rows) { pack_rows(e + j, of.row, lanes, rows, 1, place.panel); });
      store_gradient<A>(place.sums, lanes, size, 1, to + (n / panels * p.projected + first) * size);
    });
  }
  // to = E^T of_rows: what the gradient of projected rows is to those that were projected.
  void back(const Operand& projection, const A* of_rows, int64_t size, T* to) const {
    const Projection<T> of(projection);
    const int64_t panels = ceil_div(p.keys, P);
    parallel_for(p.threads, p.outer * p.batch * p.kv_heads * panels, [&](int64_t n, int thread) {
      const Place<A> place(all + thread * own, size);
      const int64_t index = n / panels, first = n % panels * P, lanes = smaller(P, p.keys - first);
      const T* const e = of.data + KeyHead(p, index).head * of.head + first;
      sum_rows(lanes, of_rows + index * p.projected * size, size, p.projected, size, place, [&](int64_t r, int64_t rows) {
        for (int64_t i = 0; i < rows; i++)
          for (int64_t c = 0; c < P; c += Vec<A>::width) {
            const int64_t count = smaller(Vec<A>::width, lanes - c);
            store(place.panel + i * P + c, count > 0 ? load_some(e + (r + i) * of.row + c, count) : Vec<A>(A(0)));
          }
      });
      store_gradient<T>(place.sums, lanes, size, 1, to + (index * p.keys + first) * size);
    });
  }
  // to = of_rows x^T, contiguous, of each head or of all: the sum over batches, and then over heads, in their order.
  void of_projection(const Operand& projection, const A* of_rows, const T* x, const AttentionStrides& x_at, int64_t size,
                     T* to) const {
    const int64_t heads = projection.rank > 2 && projection.sizes[projection.rank - 3] != 1 ? p.kv_heads : 1,
                  each = p.kv_heads / heads, panels = ceil_div(p.projected, P), tiles = ceil_div(p.keys, kKeys);
    parallel_for(p.threads, heads * panels * tiles, [&](int64_t n, int thread) {
      Cut<A> cut{all + thread * own};
      A *const left = cut.take(size * P), *const product = cut.take(kKeys * P), *const sums = cut.take(kKeys * P),
               *const rows = cut.take(kKeys * padded<A>(size)), *const line = cut.take(kKeys);
      const int64_t head = n / (panels * tiles), first = n / tiles % panels * P, key = n % tiles * kKeys,
                    lanes = smaller(P, p.projected - first), keys = smaller(kKeys, p.keys - key);
      for (int64_t i = 0; i < keys * P; i += Vec<A>::width) store(sums + i, Vec<A>(A(0)));
      for (int64_t b = 0; b < p.outer * p.batch * each; b++) {
        const int64_t index = b / each * p.kv_heads + head + b % each;
        pack_rows(of_rows + (index * p.projected + first) * size, size, lanes, size, 1, left);
        const T* const from = x + KeyHead(p, index).of(x_at) + key * x_at.row;
        multiply_rows(rows_at(from, x_at.row, keys, size, false, rows), keys, left, size, product);
        for (int64_t i = 0; i < keys * P; i += Vec<A>::width) store(sums + i, load(sums + i) + load(product + i));
      }
      for (int64_t r = 0; r < lanes; r++) {
        for (int64_t j = 0; j < keys; j++) line[j] = sums[j * P + r];
        T* const row = to + (head * p.projected + first + r) * p.keys + key;
        for (int64_t j = 0; j < keys; j += Vec<A>::width) store_some(row + j, load(line + j), smaller(Vec<A>::width, keys - j));
      }
    });
  }
  // Rows of queries in another type, from where some lie to where others do.
  template <class From, class To>
  void convert(const From* from, const AttentionStrides& from_at, int64_t size, To* to, const AttentionStrides& to_at) const {
    parallel_ranges(p.threads, p.outer * p.batch * p.heads * p.queries, 16, [&](int64_t begin, int64_t end, int) {
      for (int64_t n = begin; n < end; n++) {
        const HeadAt at(p, n / p.queries);
        const int64_t i = n % p.queries;
        const From* const x = from + at.of(from_at) + i * from_at.row;
        To* const y = to + at.of(to_at) + i * to_at.row;
        for (int64_t c = 0; c < size; c += Vec<A>::width) {
          const int64_t count = smaller(Vec<A>::width, size - c);
          store_some(y + c, load_some(x + c, count), count);
        }
      }
    });
  }
};

// ---- Forward and backward ----------------------------------------------------------------------------------------------------
template <class T>
int64_t projected_bytes(const AttentionProblem& p) {
  using A = Acc<T>;
  return checked_add(checked_add(workspace_bytes<A>(elements(p, p.kv_heads, p.projected, p.size)),
                                 workspace_bytes<A>(elements(p, p.kv_heads, p.projected, p.value_size))),
                     workspace_bytes<A>(checked_mul(p.threads, Linformer<T>::own_size(p))));
}
template <class T>
int64_t widened_bytes(const AttentionProblem& p, int64_t of_size, int64_t of_value_size) {
  if (!kWidens<T>) return 0;
  const int64_t query = workspace_bytes<Acc<T>>(elements(p, p.heads, p.queries, p.size)),
                output = workspace_bytes<Acc<T>>(elements(p, p.heads, p.queries, p.value_size));
  return checked_add(checked_mul(of_size, query), checked_mul(of_value_size, output));
}
int64_t linformer_workspace(const AttentionProblem& p) {
  return with_type(p.dtype, [&]<class T>() {
    return checked_add(checked_add(projected_bytes<T>(p), widened_bytes<T>(p, 1, 1)), flash_workspace(over_projected<T>(p)));
  });
}

template <class T>
void attention_linformer(const AttentionProblem& p, const AttentionOperands& m, Workspace& workspace) {
  using A = Acc<T>;
  const AttentionProblem inner = over_projected<T>(p);
  A *const keys = workspace.take<A>(elements(p, p.kv_heads, p.projected, p.size)), *const values = workspace.take<A>(elements(
                                                                                       p, p.kv_heads, p.projected, p.value_size));
  const Linformer<T> of{p, workspace.take<A>(p.threads * Linformer<T>::own_size(p))};
  of.project(m.own[key_projection], m.key.read<T>(), p.key_at, p.size, keys);
  of.project(m.own[value_projection], m.value.read<T>(), p.value_at, p.value_size, values);
  AttentionOperands projected{.query = m.query,
                              .key = keys,
                              .value = values,
                              .output = m.output,
                              .logsumexp = m.logsumexp,
                              .dropout_seed = m.dropout_seed};
  if constexpr (kWidens<T>) {
    A *const query = workspace.take<A>(elements(p, p.heads, p.queries, p.size)), *const output = workspace.take<A>(elements(
                                                                                     p, p.heads, p.queries, p.value_size));
    of.convert(m.query.read<T>(), p.query_at, p.size, query, inner.query_at);
    projected.query = query, projected.output = output;
    attend_flash(inner, projected, workspace);
    of.convert(static_cast<const A*>(output), inner.output_at, p.value_size, m.output.write<T>(), p.output_at);
  } else {
    attend_flash(inner, projected, workspace);
  }
}

GradientNames linformer_gradients(const AttentionProblem&) { return {"linformer", "linformer"}; }

int64_t linformer_backward_workspace(const AttentionProblem& p, const AttentionGradients& m) {
  return with_type(p.dtype, [&]<class T>() {
    const int64_t twice = checked_mul(2, projected_bytes<T>(p));  // their gradients, too
    const AttentionProblem inner = over_projected<T>(p);
    return checked_add(
        checked_add(twice, widened_bytes<T>(p, 2, 2)),
        checked_add(kWidens<T> ? flash_workspace(inner) : 0, flash_backward_workspace(inner, {.grad_query = m.grad_query})));
  });
}
void linformer_backward(const AttentionProblem& p, const AttentionGradients& m, Workspace& workspace) {
  with_type(p.dtype, [&]<class T>() {
    using A = Acc<T>;
    const AttentionProblem inner = over_projected<T>(p);
    const int64_t of_keys = elements(p, p.kv_heads, p.projected, p.size),
                  of_values = elements(p, p.kv_heads, p.projected, p.value_size);
    A *const keys = workspace.take<A>(of_keys), *const values = workspace.take<A>(of_values);
    A *const grad_keys = workspace.take<A>(of_keys), *const grad_values = workspace.take<A>(of_values);
    const Linformer<T> of{p, workspace.take<A>(p.threads * Linformer<T>::own_size(p))};
    const Operand &e = m.own[key_projection], &f = m.own[value_projection];
    const T *const key = m.key.read<T>(), *const value = m.value.read<T>();
    of.project(e, key, p.key_at, p.size, keys), of.project(f, value, p.value_at, p.value_size, values);
    const bool needs_keys = m.grad_key || m.grad_own[key_projection], needs_values = m.grad_value || m.grad_own[value_projection];
    AttentionGradients g{.grad_output = m.grad_output,
                         .query = m.query,
                         .key = keys,
                         .value = values,
                         .output = m.output,
                         .logsumexp = m.logsumexp,
                         .dropout_seed = m.dropout_seed,
                         .grad_query = m.grad_query};
    if (needs_keys) g.grad_key = grad_keys;
    if (needs_values) g.grad_value = grad_values;
    A* grad_query = nullptr;
    if constexpr (kWidens<T>) {
      const int64_t of_queries = elements(p, p.heads, p.queries, p.size),
                    of_outputs = elements(p, p.heads, p.queries, p.value_size);
      A *const query = workspace.take<A>(of_queries), *const output = workspace.take<A>(of_outputs),
               *const grad_output = workspace.take<A>(of_outputs);
      grad_query = workspace.take<A>(of_queries);
      of.convert(m.query.read<T>(), p.query_at, p.size, query, inner.query_at);
      of.convert(m.grad_output.read<T>(), p.output_at, p.value_size, grad_output, inner.output_at);
      // Before it was rounded: of that one the scores' gradients, differences of sums near each other, would be too far off.
      attend_flash(inner, {.query = query, .key = keys, .value = values, .output = output, .dropout_seed = m.dropout_seed},
                   workspace);
      g.query = query, g.output = output, g.grad_output = grad_output;
      if (m.grad_query) g.grad_query = grad_query;
    }
    differentiate_flash(inner, g, workspace);
    if constexpr (kWidens<T>)
      if (m.grad_query)
        of.convert(static_cast<const A*>(grad_query), inner.query_at, p.size, m.grad_query.write<T>(), inner.query_at);
    if (m.grad_key) of.back(e, grad_keys, p.size, m.grad_key.write<T>());
    if (m.grad_value) of.back(f, grad_values, p.value_size, m.grad_value.write<T>());
    if (const Operand& to = m.grad_own[key_projection]) of.of_projection(e, grad_keys, key, p.key_at, p.size, to.write<T>());
    if (const Operand& to = m.grad_own[value_projection])
      of.of_projection(f, grad_values, value, p.value_at, p.value_size, to.write<T>());
  });
}

AI3_ALGORITHM(attention, linformer, .accuracy = Accuracy::approximate, .supports = projections_fit,
              .workspace = linformer_workspace, .gradients = linformer_gradients, .backward = linformer_backward,
              .backward_workspace = linformer_backward_workspace, .parameters = "Tensor key_projection, Tensor value_projection")

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

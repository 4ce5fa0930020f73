// y = x * w^T as one packed matrix product (core/gemm.h). With few rows it is bound by the bandwidth at which the packed weight,
// one contiguous stream for each thread, comes from memory.
#include "../core/gemm.h"

namespace ai3::inline AI3_LEVEL {
namespace {

// Rows are copied where they must be widened, or would collide in the L1 cache.
template <class T>
bool copies(const LinearProblem& p) {
  return sizeof(T) != sizeof(Acc<T>) || (p.rows > 8 && rows_collide<T>(p.in_features));
}
template <class T>
Grid grid_of(const LinearProblem& p) {
  return gemm_grid<Acc<T>>(p.threads, 1, ceil_div(p.rows, kRows), kRows, panel_count<Acc<T>>(p.out_features), p.in_features,
                           copies<T>(p) ? .25 : 0);
}
// Elements of each thread's copy.
template <class T>
int64_t copy_size(const LinearProblem& p, const Grid& grid) {
  const int64_t rows = ceil_div(ceil_div(p.rows, kRows), grid.prepared) * kRows;
  return copies<T>(p) ? round_up(checked_mul(rows, prepared_stride<Acc<T>>(p.in_features)), 64) : 0;
}
int64_t linear_gemm_workspace(const LinearProblem& p) {
  if (p.rows <= 0 || p.in_features <= 0) return 0;
  return with_type(p.dtype,
                   [&]<class T>() { return workspace_bytes<Acc<T>>(checked_mul(p.threads, copy_size<T>(p, grid_of<T>(p)))); });
}

int64_t linear_gemm_packed_bytes(const LinearProblem& p) {
  return with_type(p.dtype,
                   [&]<class T>() { return workspace_bytes<Acc<T>>(packed_size<Acc<T>>(p.in_features, p.out_features)); });
}
void linear_gemm_pack(const LinearProblem& p, const void* weight, void* packed) {
  with_type(p.dtype, [&]<class T>() {
    const int64_t k = p.in_features, panel = k * kPanel<Acc<T>>;
    parallel_for(p.threads, panel_count<Acc<T>>(p.out_features), [&](int64_t i, int) {
      const int64_t column = i * kPanel<Acc<T>>, rest = p.out_features - column;
      pack_panels(static_cast<const T*>(weight) + column * k, k, rest < kPanel<Acc<T>> ? rest : kPanel<Acc<T>>, 1, k,
                  static_cast<Acc<T>*>(packed) + i * panel, panel);
    });
  });
}

template <class T>
void linear_gemm(const LinearProblem& p, const Buffers& m, Workspace& workspace) {
  if (p.rows == 0) return;
  using A = Acc<T>;
  const int64_t k = p.in_features, stride = prepared_stride<A>(k);
  const T* x = static_cast<const T*>(m.input);
  const A* w = static_cast<const A*>(m.weight);
  Output<T> y{static_cast<T*>(m.output), p.out_features};
  y.bias = static_cast<const T*>(m.bias), y.residual = static_cast<const T*>(m.residual), y.activation = p.activation;
  const Grid grid = grid_of<T>(p);
  const int64_t size = copy_size<T>(p, grid);
  A* copied = size ? workspace.take<A>(p.threads * size) : nullptr;
  for_grid(p.threads, 1, grid, [&](int64_t, int64_t i, int64_t j, int thread) {
    const Share rows = row_share(p.rows, grid.prepared, i), columns = column_share<A>(p.out_features, grid.streamed, j);
    StridedRows<A> a{};
    if (size) {
      a = {copied + thread * size, stride};
      for (int64_t r = rows.begin; r < rows.end; r++)
        copy_widened(x + r * k, k, copied + thread * size + (r - rows.begin) * stride);
    } else if constexpr (sizeof(T) == sizeof(A)) {
      a = {x + rows.begin * k, k};
    }
    gemm_block<T>(a, rows.end - rows.begin, w + columns.begin * k, columns.end - columns.begin, k,
                  y.from(rows.begin, columns.begin));
  });
}

Cost linear_gemm_cost(const LinearProblem& p) {
  const double m = static_cast<double>(p.rows), k = static_cast<double>(p.in_features), n = static_cast<double>(p.out_features);
  return {2 * m * k * n, static_cast<double>(size_of(p.dtype)) * (m * k + m * n) + 4 * k * n, .95};
}

AI3_ALGORITHM(linear, gemm, .epilogue = true, .workspace = linear_gemm_workspace, .cost = linear_gemm_cost,
              .packed_bytes = linear_gemm_packed_bytes, .pack = linear_gemm_pack, .backward = Backward::own)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

// Implicit GEMM: the convolution as one matrix product whose patch matrix never exists. Each task gathers the patches of its
// block of pixels straight into the operand that the packed product reads, a block that stays in the L2 cache (Chetlur et al.,
// cuDNN, 2014).
#include "gradient.h"
#include "problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

template <class T>
Grid grid_of(const Conv2dProblem& p, const ConvShape& s, const PatchUnits<T>& units) {
  return gemm_grid<Acc<T>>(p.threads, p.groups, units.count, units.size, panel_count<Acc<T>>(s.filters), s.depth, 1);
}
template <class T>
int64_t block_size(const PatchUnits<T>& units, const Grid& grid) {
  return round_up(checked_product({ceil_div(units.count, grid.prepared), units.size, units.stride}), 64);
}
int64_t conv2d_implicit_gemm_workspace(const Conv2dProblem& p) {
  if (!is_concrete(p)) return 0;
  return with_type(p.dtype, [&]<class T>() {
    const ConvShape s(p);
    const PatchUnits<T> units(p, s);
    return workspace_bytes<Acc<T>>(checked_mul(p.threads, block_size(units, grid_of(p, s, units))));
  });
}

template <class T>
void conv2d_implicit_gemm(const Conv2dProblem& p, const Conv2dOperands& m, Workspace& workspace) {
  const ConvShape s(p);
  const PatchUnits<T> units(p, s);
  const Grid grid = grid_of(p, s, units);
  const int64_t size = block_size(units, grid);
  Acc<T>* blocks = workspace.take<Acc<T>>(p.threads * size);
  for_grid(p.threads, p.groups, grid, [&](int64_t group, int64_t i, int64_t j, int thread) {
    const Share filters = column_share<Acc<T>>(s.filters, grid.streamed, j);
    Acc<T>* block = blocks + thread * size;
    if (s.as_rows) {
      const Share rows = row_share(s.rows, grid.prepared, i);
      gather_rows<T>(p, s, m, group, rows, block, units.stride);
      multiply_rows<T>(p, s, m, group, rows, block, units.stride, filters);
    } else {
      const Share panels = share(units.count, grid.prepared, i);
      gather_panels<T>(p, s, m, group, panels, block);
      multiply_panels<T>(p, s, m, group, panels, block, filters);
    }
  });
}

Cost conv2d_implicit_gemm_cost(const Conv2dProblem& p) { return gemm_cost(p, 0, .88); }

void conv2d_implicit_gemm_backward(const Conv2dProblem& p, const WeightedGradients& m, Workspace& workspace) {
  with_type(p.dtype, [&]<class T>() {
    const T *gy = m.grad_output.read<T>(), *x = m.input.read<T>(), *w = m.weight.read<T>();
    if (m.grad_input) InputGradient<T>(p).run(gy, w, m.grad_input.write<T>(), workspace);
    if (m.grad_weight) WeightGradient<T>(p).run(gy, x, m.grad_weight.write<T>(), m.grad_bias.write<T>(), workspace);
  });
}
int64_t conv2d_implicit_gemm_backward_workspace(const Conv2dProblem& p, const WeightedGradients& m) {
  return with_type(p.dtype, [&]<class T>() {
    const int64_t input = m.grad_input ? InputGradient<T>(p).workspace() : 0;
    return checked_add(input, m.grad_weight ? WeightGradient<T>(p).workspace() : 0);
  });
}

AI3_ALGORITHM(conv2d, implicit_gemm, .epilogue = true, .workspace = conv2d_implicit_gemm_workspace,
              .cost = conv2d_implicit_gemm_cost, .packed_bytes = packed_weight_bytes, .pack = pack_weight,
              .gradients = by_patches, .backward = conv2d_implicit_gemm_backward,
              .backward_workspace = conv2d_implicit_gemm_backward_workspace, .prologue = true, .sliced = true)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

// im2col: the patches are written out as a matrix, which is then multiplied with the weights (Chellapilla et al. 2006). The
// matrix is built in parts that fit the L3 cache, all groups beside each other: rows of patches for NHWC, panels of patch columns
// for NCHW.
#include "backward.h"
#include "delegated.h"
#include "patches.h"
#include "problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

// The part of the matrix that exists at one time, in units of each group.
template <class T>
int64_t part_units(const Conv2dProblem& p, const PatchUnits<T>& units) {
  constexpr int64_t kPartBytes = 8 << 20;
  const int64_t unit = checked_product({p.groups, units.size, units.stride, static_cast<int64_t>(sizeof(Acc<T>))});
  const int64_t parts = ceil_div(units.count, unit < kPartBytes ? kPartBytes / unit : 1);
  return ceil_div(units.count, parts);
}
int64_t conv2d_im2col_workspace(const Conv2dProblem& p) {
  if (!is_concrete(p)) return 0;
  return with_type(p.dtype, [&]<class T>() {
    const PatchUnits<T> units(p, ConvShape(p));
    return workspace_bytes<Acc<T>>(checked_product({p.groups, part_units(p, units), units.size, units.stride}));
  });
}

template <class T>
void conv2d_im2col(const Conv2dProblem& p, const Conv2dOperands& m, Workspace& workspace) {
  using A = Acc<T>;
  const ConvShape s(p);
  const PatchUnits<T> units(p, s);
  const int64_t part = part_units(p, units), group_size = part * units.size * units.stride;
  A* matrix = workspace.take<A>(p.groups * group_size);
  for (int64_t first = 0; first < units.count; first += part) {
    const int64_t n = units.count - first < part ? units.count - first : part;
    auto rows_of = [&](Share u) { return Share{first * kRows + u.begin, first * kRows + u.end}; };
    const int64_t row_count = s.rows - first * kRows < n * kRows ? s.rows - first * kRows : n * kRows;
    auto patches = [&](int64_t group, int64_t unit_or_row) {
      return matrix + group * group_size + unit_or_row * units.stride * (s.as_rows ? 1 : units.size);
    };
    parallel_for(p.threads, p.groups * n, [&](int64_t i, int) {
      const int64_t group = i / n, u = i % n;
      if (s.as_rows) {
        const Share rows{u * kRows, (u + 1) * kRows < row_count ? (u + 1) * kRows : row_count};
        gather_rows<T>(p, s, m, group, rows_of(rows), patches(group, rows.begin), units.stride);
      } else {
        gather_panels<T>(p, s, m, group, {first + u, first + u + 1}, patches(group, u));
      }
    });
    const Grid grid = gemm_grid<A>(p.threads, p.groups, n, units.size, panel_count<A>(s.filters), s.depth, 0);
    for_grid(p.threads, p.groups, grid, [&](int64_t group, int64_t i, int64_t j, int) {
      const Share filters = column_share<A>(s.filters, grid.streamed, j);
      if (s.as_rows) {
        const Share rows = row_share(row_count, grid.prepared, i);
        multiply_rows<T>(p, s, m, group, rows_of(rows), patches(group, rows.begin), units.stride, filters);
      } else {
        const Share panels = share(n, grid.prepared, i);
        multiply_panels<T>(p, s, m, group, {first + panels.begin, first + panels.end}, patches(group, panels.begin), filters);
      }
    });
  }
}

Cost conv2d_im2col_cost(const Conv2dProblem& p) { return gemm_cost(p, 2, .9); }

AI3_ALGORITHM(conv2d, im2col, .epilogue = true, .workspace = conv2d_im2col_workspace, .cost = conv2d_im2col_cost,
              .packed_bytes = packed_weight_bytes, .pack = pack_weight, .gradients = by_patches, .prologue = true, .sliced = true)

}  // namespace

const Algorithm<Conv2dProblem>& conv2d_im2col_record() { return conv2d_im2col_algorithm; }

}  // namespace ai3::inline AI3_LEVEL

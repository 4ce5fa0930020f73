// What convolutions by indirection share: the product reads runs of an input in NHWC through pointers, which each thread has for
// its block of pixels.
#pragma once
#include "patches.h"

namespace ai3::inline AI3_LEVEL {
namespace {

template <class T>
struct Indirect {
  using A = Acc<T>;
  const Conv2dProblem& p;
  ConvShape s;
  Grid grid;
  int64_t size;  // pointers of a block, of which each pixel may have one for each tap

  explicit Indirect(const Conv2dProblem& problem)
      : p(problem),
        s(p),
        grid(
            gemm_grid<A>(p.threads, p.batch * p.groups, ceil_div(s.pixels, kRows), kRows, panel_count<A>(s.filters), s.depth, 0)),
        size(round_up(checked_product({ceil_div(ceil_div(s.pixels, kRows), grid.prepared), kRows, s.taps}), 64)) {}
  // Of the pointers, and of the input's copy where it is not of the accumulator's type in NHWC.
  int64_t workspace() const {
    return checked_add(workspace_bytes<A>(nhwc_copy_size<T>(p)), workspace_bytes<const A*>(checked_mul(p.threads, size)));
  }
  // fill(pointers, image, pixels) writes `runs` pointers for each pixel of the share: pointers[run * pixels.size() + pixel].
  template <class Fill>
  void multiply(const Conv2dOperands& m, int64_t runs, Workspace& workspace, const Fill& fill) const {
    const A** blocks = workspace.take<const A*>(p.threads * size);
    for_grid(p.threads, p.batch * p.groups, grid, [&](int64_t product, int64_t i, int64_t j, int thread) {
      const int64_t image = product / p.groups, group = product % p.groups;
      const Share rows = row_share(s.pixels, grid.prepared, i), filters = column_share<A>(s.filters, grid.streamed, j);
      const A** pointers = blocks + thread * size;
      fill(pointers, image, rows);
      gemm_block<T>(IndirectRows<A>{pointers, rows.size(), group * s.channels, s.depth / runs}, rows.size(),
                    packed_group<T>(m, s, group) + filters.begin * s.depth, filters.size(), s.depth,
                    image_rows<T>(p, s, m, image, group).from(rows.begin, filters.begin));
    });
  }
};

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

// How packed products (gemm.h) are cut into tasks for threads.
#pragma once
#include "micro_kernel.h"
#include "tiles.h"

namespace ai3::inline AI3_LEVEL {

// How products are cut into tasks: each task prepares (copies, gathers) one of `prepared` shares of its operand's units, slabs of
// kRows rows or panels, and multiplies it with one of `streamed` shares of the packed weight's panels.
struct Grid {
  int64_t prepared, streamed;
  bool even = false;  // one task for each of more than two threads: rows may be shared evenly, in slabs of less than kRows rows
};
// The grid of the least modelled time, in cycles: both sides are cut, so that small products use all threads too. A task reads
// its part of both operands once; its prepared one, `block_k` elements of k at a time, stays in the L2 cache. `preparation` is
// cycles per element besides.
template <class A>
Grid gemm_grid(int threads, int64_t products, int64_t units, int64_t unit_size, int64_t panels, int64_t k, double preparation,
               int64_t block_k = kOverflow) {
  constexpr int64_t kBlockBytes = 512 << 10;
  constexpr double kStreamedPerCycle = 16. / sizeof(A), kTask = 1000;
  const int64_t unit = unit_size * (k < block_k ? k : block_k) * static_cast<int64_t>(sizeof(A)),
                most = unit > 0 && unit < kBlockBytes ? kBlockBytes / unit : 1;
  Grid best{};
  double least = 0;
  for (int64_t prepared = ceil_div(units, most); prepared > 0;
       prepared = prepared == units ? 0 : smaller(units, prepared % threads ? round_up(prepared, threads) : prepared * 2))
    for (int64_t streamed = 1; streamed > 0; streamed = streamed == panels ? 0 : streamed * 2 < panels ? streamed * 2 : panels) {
      const double rows = static_cast<double>(ceil_div(units, prepared) * unit_size * k),
                   columns = static_cast<double>(ceil_div(panels, streamed) * kPanel<A>);
      const double read = (rows + columns * static_cast<double>(k)) / kStreamedPerCycle;
      const double task = kTask + rows * (columns / Vec<A>::width + preparation) + read;
      const double time = task * static_cast<double>(ceil_div(products * prepared * streamed, threads));
      if (best.prepared && time >= least) continue;
      best = {prepared, streamed}, least = time;
    }
  best.even = threads > 2 && best.prepared > 0 && panels > 0 && products * best.prepared * best.streamed <= threads;
  if (best.even) best.streamed = ceil_div(panels, ceil_div(panels, best.streamed));  // as few as are done at the same time
  return best;
}
// The same for rows of pairs. In tiles their groups stay in the L2 cache whatever a task has, and where there are many, each
// thread takes a share of the rows: what comes next shares them alike.
inline Grid pair_grid(int threads, int64_t products, int64_t rows, int64_t columns, int64_t k, double preparation) {
  constexpr int64_t kManyRows = 256;  // of a thread
  const bool tiles = fills_tiles(rows, k);
  if (tiles && products == 1 && rows >= kManyRows * threads) return {threads, 1, threads > 2};
  return gemm_grid<float>(threads, products, ceil_div(rows, kRows), kRows, panel_count<float>(columns), k, preparation,
                          tiles ? 1 : k);
}
// body(product, prepared share, streamed share, thread) for every task. Neighbours in time use the same part of the weight.
// size(prepared share, streamed share) as in parallel_for.
struct TasksAlike {
  AI3_INLINE double operator()(int64_t, int64_t) const { return 1; }
};
template <class Body, class Size = TasksAlike>
AI3_INLINE void for_grid(int threads, int64_t products, const Grid& grid, const Body& body, const Size& size = {}) {
  parallel_for(
      threads, products * grid.prepared * grid.streamed,
      [&](int64_t i, int thread) {
        const int64_t rest = i / grid.prepared;
        body(rest / grid.streamed, i % grid.prepared, rest % grid.streamed, thread);
      },
      [&](int64_t i) { return size(i % grid.prepared, i / grid.prepared % grid.streamed); });
}
// Share i of `rows` rows, in whole slabs of about equal height.
AI3_INLINE Share row_share(int64_t rows, int64_t shares, int64_t i) {
  const int64_t slabs = ceil_div(rows, kRows);
  const Share s = share(slabs, shares, i);
  return {rows * s.begin / slabs, rows * s.end / slabs};
}
AI3_INLINE Share row_share(int64_t rows, const Grid& grid, int64_t i) {
  return grid.even ? share(rows, grid.prepared, i) : row_share(rows, grid.prepared, i);
}
// Share i of `columns` columns, in whole panels.
template <class A>
AI3_INLINE Share column_share(int64_t columns, int64_t shares, int64_t i) {
  const Share s = share(panel_count<A>(columns), shares, i);
  return {s.begin * kPanel<A>, s.end * kPanel<A> < columns ? s.end * kPanel<A> : columns};
}
// The size of a task that multiplies these shares of rows and columns.
template <class A>
AI3_INLINE auto product_size(int64_t rows, int64_t columns, int64_t k, const Grid& grid) {
  return [=](int64_t i, int64_t j) {
    const Share r = row_share(rows, grid, i), c = column_share<A>(columns, grid.streamed, j);
    return 2. * static_cast<double>((r.end - r.begin) * panel_count<A>(c.end - c.begin) * k);
  };
}

}  // namespace ai3::inline AI3_LEVEL

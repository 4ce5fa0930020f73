// What linear's packed products share: y = x * w^T through core/gemm.h, with operands in one of three forms.
#pragma once
#include <type_traits>

#include "../core/grid.h"
#include "../core/instances.h"
#include "problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

enum class Form {
  plain,   // elements of Acc<T>
  narrow,  // the weight in 16 bits, widened as it is loaded: with few rows its bytes are what a product takes
  pairs    // of bfloat16, for processors that multiply them
};

template <class T, Form form>
struct PackedProduct {
  using A = Acc<T>;
  static constexpr bool kSame = sizeof(T) == sizeof(A);
  using Narrow = std::conditional_t<kSame, bfloat16, T>;
  using Stored = std::conditional_t<form == Form::narrow, Narrow, A>;              // elements of the packed weight
  static constexpr int64_t P = kPanel<A>, kPerStep = form == Form::pairs ? 2 : 1;  // elements of k in a step

  const LinearProblem& p;
  int64_t steps = ceil_div(p.in_features, kPerStep);
  // Rows are copied where they must be converted, and few that collide, so that less slabs read the weight
  // (docs/decisions/gemm.md).
  bool copies = !(form == Form::pairs ? sizeof(T) == 2 && p.in_features % 2 == 0 : kSame) ||
                (p.rows > kRows / 2 && p.rows <= 2 * kRows && rows_collide<A>(p.x_row / kPerStep));
  // Blocks of k, about equal, that are multiplied at a time: many rows of one stay in the L2 cache, and the weight is read once.
  // Rows that are copied come through the same cache. Sums of a narrower type must not be stored in between.
  int64_t blocks =
      !kSame || p.rows <= kRows ? 1 : larger(1, ceil_div(steps, (copies ? 2560 : 3072) / static_cast<int64_t>(sizeof(A))));
  static constexpr int64_t kUnit = form == Form::pairs ? kTilePairs : 1;  // of a block: pairs that fill tiles
  int64_t units = ceil_div(steps, kUnit), block = smaller(steps, ceil_div(units, blocks) * kUnit),
          stride = prepared_stride<A>(block);
  Grid grid = grid_of();

  Share part(int64_t b) const {
    const Share of = share(units, blocks, b);
    return {of.begin * kUnit, smaller(steps, of.end * kUnit)};
  }
  Grid grid_of() const {
    const double preparation = copies ? .25 : 0;
    if constexpr (form == Form::pairs && !kSame) return pair_grid(p.threads, 1, p.rows, p.out_features, steps, preparation);
    // A block's panels are small, so its rows may have 4/3 of the part of the L2 cache that a grid's rows have.
    return gemm_grid<A>(p.threads, 1, ceil_div(p.rows, kRows), kRows, panel_count<A>(p.out_features), steps, preparation,
                        kSame ? block * 3 / 4 : block);
  }
  // Elements of each thread's copy.
  int64_t copy_size() const {
    return copies ? round_up(checked_mul(ceil_div(ceil_div(p.rows, kRows), grid.prepared) * kRows, stride), 64) : 0;
  }

  // `count` elements of a row.
  static void copy(const T* from, int64_t count, A* to) {
    constexpr int width = Vec<A>::width;
    if constexpr (form != Form::pairs) {
      copy_widened(from, count, to);
    } else {
      bfloat16* pairs = reinterpret_cast<bfloat16*>(to);
      int64_t i = 0;
      for (; i + width <= count; i += width) store(pairs + i, load(from + i));
      for (; i < count; i++) narrow(widen(from[i]), pairs[i]);
      if (count % 2) pairs[count] = {};
    }
  }
  static auto rows_at(const void* data, int64_t elements_apart) {
    if constexpr (form == Form::pairs)
      return PairRows{static_cast<const bfloat16*>(data), elements_apart};
    else
      return StridedRows<A>{static_cast<const A*>(data), elements_apart};
  }

  void pack(const T* weight, Stored* packed) const {
    const int64_t k = p.in_features, panel = steps * P;
    parallel_for(p.threads, panel_count<A>(p.out_features), [&](int64_t i, int) {
      const T* from = weight + i * P * k;
      Stored* to = packed + i * panel;
      const int64_t columns = smaller(P, p.out_features - i * P);
      if constexpr (form == Form::pairs)
        pack_pair_panels(from, k, columns, k, to, panel);
      else
        pack_panels(from, k, columns, 1, k, to, panel);
    });
  }

  void multiply(const LinearOperands& m, Workspace& workspace) const {
    const int64_t k = p.in_features, size = copy_size();
    const T* x = m.input.read<T>();
    const Stored* w = m.weight.read<Stored>();
    Output<T> y{m.output.write<T>(), p.y_row};
    y.set_epilogue(p.activation, m);
    A* copied = size ? workspace.take<A>(p.threads * size) : nullptr;
    auto multiply_task = [&](int64_t, int64_t i, int64_t j, int thread) {
      const Share rows = row_share(p.rows, grid, i), columns = column_share<A>(p.out_features, grid.streamed, j);
      for (int64_t b = 0; b < blocks; b++) {
        const Share of = part(b);
        const int64_t first = of.begin * kPerStep, count = smaller(k, of.end * kPerStep) - first;
        A* to = copied + thread * size;
        for (int64_t r = rows.begin; copies && r < rows.end; r++)
          copy(x + r * p.x_row + first, count, to + (r - rows.begin) * stride);
        const auto a = copies ? rows_at(to, stride * kPerStep) : rows_at(x + rows.begin * p.x_row + first, p.x_row);
        gemm_block<T>(a, rows.end - rows.begin, w + columns.begin * steps + of.begin * P, steps * P, columns.size(), of.size(),
                      y.from(rows.begin, columns.begin).part(b == 0, b == blocks - 1));
      }
    };
    for_grid(p.threads, 1, grid, multiply_task, product_size<A>(p.rows, p.out_features, steps, grid));
  }
};

// What an algorithm's functions do with its product; `with` calls its argument with the product that the problem needs.
template <class With>
int64_t product_workspace(const LinearProblem& p, const With& with) {
  if (p.rows <= 0 || p.in_features <= 0) return 0;
  return with(p, [&]<class T, Form form>() {
    return workspace_bytes<Acc<T>>(checked_mul(p.threads, PackedProduct<T, form>{p}.copy_size()));
  });
}
template <class With>
int64_t product_packed_bytes(const LinearProblem& p, const With& with) {
  return with(p, [&]<class T, Form form>() {
    using Product = PackedProduct<T, form>;
    return workspace_bytes<typename Product::Stored>(
        packed_size<Acc<T>>(ceil_div(p.in_features, Product::kPerStep), p.out_features));
  });
}
template <class With>
void product_pack(const LinearProblem& p, const void* weight, void* packed, const With& with) {
  with(p, [&]<class T, Form form>() {
    using Product = PackedProduct<T, form>;
    Product{p}.pack(static_cast<const T*>(weight), static_cast<typename Product::Stored*>(packed));
  });
}

template <class With>
Cost product_cost(const LinearProblem& p, const With& with) {
  const double m = static_cast<double>(p.rows), k = static_cast<double>(p.in_features), n = static_cast<double>(p.out_features);
  return with(p, [&]<class T, Form form>() {
    constexpr bool pairs = form == Form::pairs;
    return Cost{2 * m * k * n, sizeof(T) * (m * k + m * n) + (form == Form::plain ? sizeof(Acc<T>) : 2) * k * n,
                !pairs               ? .95
                : has_matrix_tiles() ? 6
                                     : 1.6};
  });
}

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

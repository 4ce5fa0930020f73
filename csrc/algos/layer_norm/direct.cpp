// Row by row, each read into the nearest cache once and from there again: its mean, its variance around that mean, the output
// (moments.h). Sums of long rows are taken in parts, which are added in float64.
#include "../core/moments.h"
#include "problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

// Of rows, each with sums of its own for the weight's gradient: as many for any thread count.
constexpr int64_t kChunksAtMost = 32;

// Rows of 16 bits are kept in the accumulator's type, so that they are converted once.
template <class A>
AI3_INLINE int64_t wide_row(const LayerNormProblem& p) {
  return round_up(p.features, Vec<A>::width);
}
template <class T>
int64_t wide_rows(const LayerNormProblem& p) {
  return sizeof(T) == 2 ? workspace_bytes<Acc<T>>(checked_mul(p.threads, wide_row<Acc<T>>(p))) : 0;
}
// Elements from i on of a row or of its wide form.
template <class T>
AI3_INLINE Vec<Acc<T>> load_wide(const T* row, const Acc<T>* wide, int64_t i, int64_t n) {
  if constexpr (sizeof(T) == 2)
    return load(wide + i);
  else
    return load_some(row + i, n);
}

// Of a row, which is put into `wide` where that is given.
template <class T>
AI3_INLINE Moments<Acc<T>> moments_in(const LayerNormProblem& p, const T* x, Acc<T>* wide, Acc<T> unit) {
  using A = Acc<T>;
  using V = Vec<A>;
  const double n = static_cast<double>(p.features);
  double sum[1], around[2];
  sum_row<1, A>(p.features, sum, [&](V* sums, int64_t i, int64_t count) {
    const V v = load_some(x + i, count);
    if constexpr (sizeof(T) == 2) store(wide + i, v);
    sums[0] = fma(v, V(unit), sums[0]);
  });
  const A guess = static_cast<A>(sum[0] / n);
  const Moments<A> guessed{unit, guess, A(0), A(1), A(1), true};
  sum_row<2, A>(p.features, around, [&](V* sums, int64_t i, int64_t count) {
    V d = guessed.centered(load_wide(x, wide, i, count));
    if (count < V::width) {  // what is beyond the row must not count
      for (int64_t j = count; j < V::width; j++) d.raw[j] = 0;
    }
    sums[0] += d, sums[1] = fma(d, d, sums[1]);
  });
  return moments_around(unit, guess, around[0] / n, around[1] / n, p.eps);
}
template <class T>
[[gnu::noinline]] Moments<Acc<T>> moments_of_extremes(const LayerNormProblem& p, const T* x, Acc<T>* wide) {
  const auto unit = unit_of<Acc<T>>([&](const auto& look) {
    for (int64_t i = 0; i < p.features; i++) look(widen(x[i]));
  });
  return bounded(moments_in(p, x, wide, unit), p.eps);
}
template <class T>
AI3_INLINE Moments<Acc<T>> moments(const LayerNormProblem& p, const T* x, Acc<T>* wide) {
  const Moments<Acc<T>> as_it_is = moments_in(p, x, wide, Acc<T>(1));
  return as_it_is.exact ? as_it_is : moments_of_extremes(p, x, wide);
}

int64_t layer_norm_workspace(const LayerNormProblem& p) {
  return with_type(p.dtype, [&]<class T>() { return wide_rows<T>(p); });
}

template <class T>
void layer_norm_direct(const LayerNormProblem& p, const LayerNormOperands& m, Workspace& workspace) {
  using A = Acc<T>;
  A* const wide_of_all = sizeof(T) == 2 ? workspace.take<A>(p.threads * wide_row<A>(p)) : nullptr;
  const T* const x = m.input.read<T>();
  T* const y = m.output.write<T>();
  with_weight_type<T>(p.wide_weight, [&]<class W>() {
    const W *const w = m.weight.read<W>(), *const b = m.bias.read<W>();
    parallel_ranges(p.threads, p.rows, 1, [&](int64_t begin, int64_t end, int thread) {
      A* const wide = sizeof(T) == 2 ? wide_of_all + thread * wide_row<A>(p) : nullptr;
      for (int64_t r = begin; r < end; r++) {
        const T* const row = x + r * p.features;
        T* const out = y + r * p.features;
        const Moments<A> of = moments(p, row, wide);
        auto normal = [&](int64_t i, int64_t n) { return of.normal(load_wide(row, wide, i, n)); };
        if (w && b)
          each_vector<A>(p.features, [&](int64_t i, int64_t n) {
            store_some(out + i, fma(normal(i, n), load_some(w + i, n), load_some(b + i, n)), n);
          });
        else if (w)
          each_vector<A>(p.features, [&](int64_t i, int64_t n) { store_some(out + i, normal(i, n) * load_some(w + i, n), n); });
        else if (b)
          each_vector<A>(p.features, [&](int64_t i, int64_t n) { store_some(out + i, normal(i, n) + load_some(b + i, n), n); });
        else
          each_vector<A>(p.features, [&](int64_t i, int64_t n) { store_some(out + i, normal(i, n), n); });
      }
    });
  });
}

// Gradients ----------------------------------------------------------------------------------------------------------------
AI3_INLINE int64_t chunks(const LayerNormProblem& p) { return smaller(p.rows, kChunksAtMost); }
// Sums of a chunk for weight and bias.
template <class A>
AI3_INLINE int64_t sums_of_a_chunk(const LayerNormProblem& p) {
  return 2 * round_up(p.features, Vec<A>::width);
}
int64_t backward_workspace(const LayerNormProblem& p, const WeightedGradients& m) {
  return with_type(p.dtype, [&]<class T>() {
    const bool sums = m.grad_weight || m.grad_bias;
    const int64_t of_sums = sums ? workspace_bytes<Acc<T>>(checked_mul(chunks(p), sums_of_a_chunk<Acc<T>>(p))) : 0;
    return checked_add(of_sums, wide_rows<T>(p));
  });
}

// With g = dY * weight and h the normalized row: dX = scale * (g - mean(g) - h * mean(g * h)); dweight and dbias are the sums of
// dY * h and dY over the rows, of which each chunk has its own: added in the same order whatever thread computes them.
template <class T, class W>
void backward_of(const LayerNormProblem& p, const WeightedGradients& m, Workspace& workspace) {
  using A = Acc<T>;
  using V = Vec<A>;
  const T *const gy = m.grad_output.read<T>(), *const x = m.input.read<T>();
  const W* const w = m.weight.read<W>();
  T* const gx = m.grad_input.write<T>();
  W *const gw = m.grad_weight.write<W>(), *const gb = m.grad_bias.write<W>();
  const bool sums = gw || gb;
  const int64_t count = chunks(p), own = sums_of_a_chunk<A>(p), half = own / 2;
  A* const all = sums ? workspace.take<A>(count * own) : nullptr;
  A* const wide_of_all = sizeof(T) == 2 ? workspace.take<A>(p.threads * wide_row<A>(p)) : nullptr;
  parallel_for(p.threads, count, [&](int64_t c, int thread) {
    A* const wide = sizeof(T) == 2 ? wide_of_all + thread * wide_row<A>(p) : nullptr;
    A* const of_weight = all + c * own;
    A* const of_bias = of_weight + half;
    if (sums) each_vector<A>(own, [&](int64_t i, int64_t) { store(of_weight + i, V(A(0))); });
    const Share rows = share(p.rows, count, c);
    for (int64_t r = rows.begin; r < rows.end; r++) {
      const T *const row = x + r * p.features, *const g = gy + r * p.features;
      const Moments<A> of = moments(p, row, wide);
      const V scale(of.scale_of_x);
      auto normal = [&](int64_t i, int64_t n) { return of.normal(load_wide(row, wide, i, n)); };
      auto gradient = [&](int64_t i, int64_t n) { return w ? load_some(g + i, n) * load_some(w + i, n) : load_some(g + i, n); };
      if (gx) {
        double total[2];
        sum_row<2, A>(p.features, total, [&](V* s, int64_t i, int64_t n) {
          const V v = gradient(i, n);  // 0 beyond the row
          s[0] += v, s[1] = fma(v, normal(i, n), s[1]);
        });
        const double n = static_cast<double>(p.features);
        const V first(static_cast<A>(total[0] / n)), second(static_cast<A>(total[1] / n));
        T* const out = gx + r * p.features;
        each_vector<A>(p.features, [&](int64_t i, int64_t k) {
          store_some(out + i, scale * (gradient(i, k) - first - normal(i, k) * second), k);
        });
      }
      if (sums)
        each_vector<A>(p.features, [&](int64_t i, int64_t n) {
          const V v = load_some(g + i, n);  // 0 beyond the row
          store(of_weight + i, fma(v, normal(i, n), load(of_weight + i)));
          store(of_bias + i, load(of_bias + i) + v);
        });
    }
  });
  if (!sums) return;
  parallel_ranges(p.threads, half / V::width, 64, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin * V::width; i < end * V::width; i += V::width) {
      V of_weight = load(all + i), of_bias = load(all + half + i);
      for (int64_t c = 1; c < count; c++) of_weight += load(all + c * own + i), of_bias += load(all + c * own + half + i);
      const int64_t n = smaller(p.features - i, V::width);
      if (gw) store_some(gw + i, of_weight, n);
      if (gb) store_some(gb + i, of_bias, n);
    }
  });
}
void backward(const LayerNormProblem& p, const WeightedGradients& m, Workspace& workspace) {
  with_type(p.dtype,
            [&]<class T>() { with_weight_type<T>(p.wide_weight, [&]<class W>() { backward_of<T, W>(p, m, workspace); }); });
}
GradientNames gradients(const LayerNormProblem&) { return {"direct", "direct"}; }

AI3_ALGORITHM(layer_norm, direct, .accuracy = Accuracy::bounded, .error_bound = 4e-6, .workspace = layer_norm_workspace,
              .gradients = gradients, .backward = backward, .backward_workspace = backward_workspace)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

// Rows that are normalized each by its own moments, forward and backward, as layer_norm and rms_norm take them: of a problem P
// with `rows` and `features`, `centered` around their mean or around 0, and then without a bias.
#pragma once
#include "algorithm.h"
#include "moments.h"

namespace ai3::inline AI3_LEVEL {

// Of rows, each with sums of its own for the weight's gradient: as many for any thread count.
constexpr int64_t kChunksAtMost = 32;

// Rows of 16 bits are kept in the accumulator's type, so that they are converted once.
template <class A, class P>
AI3_INLINE int64_t wide_row(const P& p) {
  return round_up(p.features, Vec<A>::width);
}
template <class T, class P>
int64_t wide_rows(const P& p) {
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
template <class T, class P>
AI3_INLINE Moments<Acc<T>> moments_in(const P& p, const T* x, Acc<T>* wide, Acc<T> unit) {
  using A = Acc<T>;
  using V = Vec<A>;
  const double n = static_cast<double>(p.features);
  double sum[1], around[2];
  if constexpr (!P::centered) {
    sum_row<1, A>(p.features, sum, [&](V* sums, int64_t i, int64_t count) {
      V v = load_some(x + i, count);  // 0 beyond the row
      if constexpr (sizeof(T) == 2) store(wide + i, v);
      v = v * V(unit), sums[0] = fma(v, v, sums[0]);
    });
    return moments_around(unit, A(0), 0.0, sum[0] / n, p.eps);
  }
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
template <class T, class P>
[[gnu::noinline]] Moments<Acc<T>> moments_of_extremes(const P& p, const T* x, Acc<T>* wide) {
  const auto unit = unit_of<Acc<T>>([&](const auto& look) {
    for (int64_t i = 0; i < p.features; i++) look(widen(x[i]));
  });
  return bounded(moments_in(p, x, wide, unit), p.eps);
}
template <class T, class P>
AI3_INLINE Moments<Acc<T>> moments(const P& p, const T* x, Acc<T>* wide) {
  const Moments<Acc<T>> as_it_is = moments_in(p, x, wide, Acc<T>(1));
  return as_it_is.exact ? as_it_is : moments_of_extremes(p, x, wide);
}

template <class P, class A>
AI3_INLINE Vec<A> normal_of(const Moments<A>& of, Vec<A> v) {
  if constexpr (P::centered)
    return of.normal(v);
  else
    return v * Vec<A>(of.unit) * Vec<A>(of.scale);
}

template <class P>
int64_t rows_workspace(const P& p) {
  return with_type(p.dtype, [&]<class T>() { return wide_rows<T>(p); });
}

template <class T, class P>
void normalize_rows(const P& p, const typename P::Operands& m, Workspace& workspace) {
  using A = Acc<T>;
  A* const wide_of_all = sizeof(T) == 2 ? workspace.take<A>(p.threads * wide_row<A>(p)) : nullptr;
  const T* const x = m.input.template read<T>();
  T* const y = m.output.template write<T>();
  with_weight_type<T>(p.wide_weight, [&]<class W>() {
    const W *const w = m.weight.template read<W>(), *b = nullptr;
    if constexpr (P::centered) b = m.bias.template read<W>();
    parallel_ranges(p.threads, p.rows, 1, [&](int64_t begin, int64_t end, int thread) {
      A* const wide = sizeof(T) == 2 ? wide_of_all + thread * wide_row<A>(p) : nullptr;
      for (int64_t r = begin; r < end; r++) {
        const T* const row = x + r * p.features;
        T* const out = y + r * p.features;
        const Moments<A> of = moments(p, row, wide);
        auto normal = [&](int64_t i, int64_t n) { return normal_of<P>(of, load_wide(row, wide, i, n)); };
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
template <class P>
AI3_INLINE int64_t chunks(const P& p) {
  return smaller(p.rows, kChunksAtMost);
}
// Sums of a chunk for weight and, where there is one, bias.
template <class A, class P>
AI3_INLINE int64_t sums_of_a_chunk(const P& p) {
  return (P::centered ? 2 : 1) * round_up(p.features, Vec<A>::width);
}
template <class P>
int64_t rows_backward_workspace(const P& p, const WeightedGradients& m) {
  return with_type(p.dtype, [&]<class T>() {
    const bool sums = m.grad_weight || m.grad_bias;
    const int64_t of_sums = sums ? workspace_bytes<Acc<T>>(checked_mul(chunks(p), sums_of_a_chunk<Acc<T>>(p))) : 0;
    return checked_add(of_sums, wide_rows<T>(p));
  });
}

// With g = dY * weight and h the normalized row: dX = scale * (g - mean(g) - h * mean(g * h)); dweight and dbias are the sums of
// dY * h and dY over the rows, of which each chunk has its own: added in the same order whatever thread computes them.
template <class T, class W, class P>
void backward_of(const P& p, const WeightedGradients& m, Workspace& workspace) {
  using A = Acc<T>;
  using V = Vec<A>;
  const T *const gy = m.grad_output.read<T>(), *const x = m.input.read<T>();
  const W* const w = m.weight.read<W>();
  T* const gx = m.grad_input.write<T>();
  W *const gw = m.grad_weight.write<W>(), *const gb = P::centered ? m.grad_bias.write<W>() : nullptr;
  const bool sums = gw || gb;
  const int64_t count = chunks(p), own = sums_of_a_chunk<A>(p), half = P::centered ? own / 2 : own;
  A* const all = sums ? workspace.take<A>(count * own) : nullptr;
  A* const wide_of_all = sizeof(T) == 2 ? workspace.take<A>(p.threads * wide_row<A>(p)) : nullptr;
  parallel_for(p.threads, count, [&](int64_t c, int thread) {
    A* const wide = sizeof(T) == 2 ? wide_of_all + thread * wide_row<A>(p) : nullptr;
    A* const of_weight = all + c * own;
    [[maybe_unused]] A* const of_bias = of_weight + half;
    if (sums) each_vector<A>(own, [&](int64_t i, int64_t) { store(of_weight + i, V(A(0))); });
    const Share rows = share(p.rows, count, c);
    for (int64_t r = rows.begin; r < rows.end; r++) {
      const T *const row = x + r * p.features, *const g = gy + r * p.features;
      const Moments<A> of = moments(p, row, wide);
      const V scale(of.scale_of_x);
      auto normal = [&](int64_t i, int64_t n) { return normal_of<P>(of, load_wide(row, wide, i, n)); };
      auto gradient = [&](int64_t i, int64_t n) { return w ? load_some(g + i, n) * load_some(w + i, n) : load_some(g + i, n); };
      if (gx) {
        double total[2];
        sum_row<2, A>(p.features, total, [&](V* s, int64_t i, int64_t n) {
          const V v = gradient(i, n);  // 0 beyond the row
          s[0] += v, s[1] = fma(v, normal(i, n), s[1]);
        });
        const double n = static_cast<double>(p.features);
        const V first(static_cast<A>(P::centered ? total[0] / n : 0)), second(static_cast<A>(total[1] / n));
        T* const out = gx + r * p.features;
        each_vector<A>(p.features, [&](int64_t i, int64_t k) {
          store_some(out + i, scale * (gradient(i, k) - first - normal(i, k) * second), k);
        });
      }
      if (sums)
        each_vector<A>(p.features, [&](int64_t i, int64_t n) {
          const V v = load_some(g + i, n);  // 0 beyond the row
          store(of_weight + i, fma(v, normal(i, n), load(of_weight + i)));
          if constexpr (P::centered) store(of_bias + i, load(of_bias + i) + v);
        });
    }
  });
  if (!sums) return;
  parallel_ranges(p.threads, half / V::width, 64, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin * V::width; i < end * V::width; i += V::width) {
      const int64_t n = smaller(p.features - i, V::width);
      auto add = [&](W* to, const A* sums) {
        V total = load(sums + i);
        for (int64_t c = 1; c < count; c++) total += load(sums + c * own + i);
        store_some(to + i, total, n);
      };
      if (gw) add(gw, all);
      if (gb) add(gb, all + half);
    }
  });
}
template <class P>
void rows_backward(const P& p, const WeightedGradients& m, Workspace& workspace) {
  with_type(p.dtype,
            [&]<class T>() { with_weight_type<T>(p.wide_weight, [&]<class W>() { backward_of<T, W>(p, m, workspace); }); });
}

}  // namespace ai3::inline AI3_LEVEL

// Row by row, each read into the nearest cache once and from there again: its mean, its variance around that mean, the output.
// The second pass also sums the differences, whose mean corrects that of the first (Chan, Golub & LeVeque, "Algorithms for
// computing the sample variance", 1983). Sums of long rows are taken in parts, which are added in float64.
#include "../core/lanes.h"
#include "problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

constexpr int64_t kPart = 4096;  // elements that are summed in the accumulator's type
constexpr int64_t kChunksAtMost =
    32;  // of rows, each with sums of its own for the weight's gradient: as many for any thread count

template <class A>
AI3_INLINE A sum_of(Vec<A> v) {
  A lanes[Vec<A>::width];
  store(lanes, v);
#pragma GCC unroll 4
  for (int half = Vec<A>::width / 2; half > 0; half /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
  return lanes[0];
}

// Adds up to `outputs` sums over a row: body(sums, i, load) adds those of the elements from i on to sums[0], sums[1], ...; `load`
// reads from a pointer to the row as many as there are, the rest as 0.
template <int outputs, class A, class Body>
AI3_INLINE void sum_row(int64_t features, double (&total)[outputs], const Body& body) {
  constexpr int64_t width = Vec<A>::width, together = 4;
  for (int o = 0; o < outputs; o++) total[o] = 0;
  for (int64_t part = 0; part < features; part += kPart) {
    const int64_t end = smaller(part + kPart, features);
    Vec<A> sums[together][outputs];
    for (auto& of_one : sums)
      for (auto& s : of_one) s = Vec<A>(A(0));
    int64_t i = part;
    for (; i + together * width <= end; i += together * width)
#pragma GCC unroll 4
      for (int64_t j = 0; j < together; j++) body(sums[j], i + j * width, width);
    for (; i + width <= end; i += width) body(sums[0], i, width);
    if (i < end) body(sums[0], i, end - i);
    for (int o = 0; o < outputs; o++)
      total[o] += static_cast<double>(sum_of((sums[0][o] + sums[1][o]) + (sums[2][o] + sums[3][o])));
  }
}

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

// The normalized row is (x * unit - mean) * scale, where 1 / unit is a power of two, and mean and scale are those of x * unit. It
// is 1 but for rows whose squares are too large or too small to be summed.
template <class A>
struct Moments {
  A unit, mean, scale;  // scale: 1 / sqrt(variance + eps)
  A scale_of_x;         // the same of x in its own unit
  bool exact;           // whether the squares could be summed

  AI3_INLINE Vec<A> centered(Vec<A> v) const { return fma(v, Vec<A>(unit), Vec<A>(-mean)); }
  AI3_INLINE Vec<A> normal(Vec<A> v) const { return centered(v) * Vec<A>(scale); }
};
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
  const Moments<A> guessed{unit, guess, A(1), A(1), true};
  sum_row<2, A>(p.features, around, [&](V* sums, int64_t i, int64_t count) {
    V d = guessed.centered(load_wide(x, wide, i, count));
    if (count < V::width) {  // what is beyond the row must not count
      for (int64_t j = count; j < V::width; j++) d.raw[j] = 0;
    }
    sums[0] += d, sums[1] = fma(d, d, sums[1]);
  });
  constexpr double kLeast = sizeof(A) == 4 ? 1e-30 : 1e-290;  // below it the type lacks some of the squares' bits
  const double u = static_cast<double>(unit), off = around[0] / n, variance = around[1] / n - off * off;
  const double spread = (variance < 0 ? 0 : variance) + p.eps * u * u, scale = 1 / __builtin_sqrt(spread);
  return {unit, static_cast<A>(static_cast<double>(guess) + off), static_cast<A>(scale), static_cast<A>(u * scale),
          around[1] < __builtin_inf() && spread >= kLeast};
}
// The unit in which a row's largest element is about 1, or as near to it as the type has units; 1 for a row of zeros, or one that
// is not finite.
template <class T>
AI3_INLINE Acc<T> unit_of(const LayerNormProblem& p, const T* x) {
  using A = Acc<T>;
  constexpr int kMost = sizeof(A) == 4 ? 126 : 1022;
  A largest = 0;
  bool finite = true;
  for (int64_t i = 0; i < p.features; i++) {
    const A v = widen(x[i]), size = v < 0 ? -v : v;
    finite = finite && size < static_cast<A>(__builtin_inf());
    if (size > largest) largest = size;
  }
  if (!finite || largest == 0) return 1;
  const int exponent = __builtin_ilogb(static_cast<double>(largest));
  return static_cast<A>(__builtin_ldexp(1, exponent > kMost ? -kMost : exponent < -kMost ? kMost : -exponent));
}
// Of a row whose squares could not be summed.
template <class T>
[[gnu::noinline]] Moments<Acc<T>> moments_of_extremes(const LayerNormProblem& p, const T* x, Acc<T>* wide) {
  using A = Acc<T>;
  Moments<A> m = moments_in(p, x, wide, unit_of(p, x));
  // One large value all over has no variance, and in its unit eps is less than the type can divide by, or nothing. Of other rows
  // scale is far below this, of which a few times are finite, too.
  constexpr A kMost = static_cast<A>(sizeof(A) == 4 ? 1e30 : 1e290);
  if (p.eps > 0 && m.scale > kMost) m.scale = kMost;
  const A most_of_x = static_cast<A>(1 / __builtin_sqrt(p.eps));
  if (m.scale_of_x > most_of_x) m.scale_of_x = most_of_x;
  return m;
}
template <class T>
AI3_INLINE Moments<Acc<T>> moments(const LayerNormProblem& p, const T* x, Acc<T>* wide) {
  const Moments<Acc<T>> as_it_is = moments_in(p, x, wide, Acc<T>(1));
  return as_it_is.exact ? as_it_is : moments_of_extremes(p, x, wide);
}

// body(i, n) for each vector of a row, the last of which may have fewer than `width` elements.
template <class A, class Body>
AI3_INLINE void each_vector(int64_t features, const Body& body) {
  constexpr int64_t width = Vec<A>::width;
  int64_t i = 0;
  for (; i + width <= features; i += width) body(i, width);
  if (i < features) body(i, features - i);
}

// body.operator()<W>() for the type of weight and bias.
template <class T, class Body>
AI3_INLINE void with_weight_type(const LayerNormProblem& p, const Body& body) {
  if constexpr (sizeof(T) == 2) {
    if (p.wide_weight) return body.template operator()<float>();
  }
  body.template operator()<T>();
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
  with_weight_type<T>(p, [&]<class W>() {
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
  with_type(p.dtype, [&]<class T>() { with_weight_type<T>(p, [&]<class W>() { backward_of<T, W>(p, m, workspace); }); });
}
GradientNames gradients(const LayerNormProblem&) { return {"direct", "direct"}; }

AI3_ALGORITHM(layer_norm, direct, .accuracy = Accuracy::bounded, .error_bound = 4e-6, .workspace = layer_norm_workspace,
              .gradients = gradients, .backward = backward, .backward_workspace = backward_workspace)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

// The definition, in three passes: the largest element, the exponentials of what each is less than that and their sum, the
// quotients. Over the last dimension a row is one vector after another; over others, where neighbours belong to different sums,
// each lane has a sum of its own. Exponentials of 16 bits are computed twice rather than rounded between the passes.
#include "../core/exp.h"
#include "../core/lanes.h"
#include "problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

constexpr int64_t kPart = 4096;  // elements of a row that are summed in the accumulator's type
constexpr int64_t kTerms = 64;   // of a lane, likewise, before they are added to the whole
constexpr int kTogether = 4;     // vectors

template <class A>
AI3_INLINE A minus_infinity() {
  return -static_cast<A>(__builtin_inf());
}
// What combine(a, b) makes of all lanes.
template <class A, class Combine>
AI3_INLINE A across(Vec<A> v, const Combine& combine) {
  A lanes[Vec<A>::width];
  store(lanes, v);
#pragma GCC unroll 4
  for (int half = Vec<A>::width / 2; half > 0; half /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < half; i++) lanes[i] = combine(lanes[i], lanes[i + half]);
  return lanes[0];
}
// n elements; the lanes beyond them are -infinity, which is the largest of nothing, and whose exponential is 0.
template <class T>
AI3_INLINE Vec<Acc<T>> load_row(const T* p, int64_t n) {
  using V = Vec<Acc<T>>;
  return n == V::width ? load(p) : select({0, n}, load_partial(p, n), V(minus_infinity<Acc<T>>()));
}
// body(i, n, k) for the vectors from `begin` to `end`, k < kTogether in turn while whole ones are together.
template <class A, class Body>
AI3_INLINE void each_vector(int64_t begin, int64_t end, const Body& body) {
  constexpr int64_t width = Vec<A>::width;
  int64_t i = begin;
  for (; i + kTogether * width <= end; i += kTogether * width)
#pragma GCC unroll 4
    for (int k = 0; k < kTogether; k++) body(i + k * width, width, k);
  for (; i + width <= end; i += width) body(i, width, 0);
  if (i < end) body(i, end - i, 0);
}

template <class T>
AI3_INLINE void softmax_row(const T* x, T* y, int64_t size) {
  using A = Acc<T>;
  using V = Vec<A>;
  constexpr bool narrow = sizeof(T) == 2;
  // NaN among them may get lost: its own exponential makes the sum NaN all the same.
  V most[kTogether];
  for (V& m : most) m = V(minus_infinity<A>());
  each_vector<A>(0, size, [&](int64_t i, int64_t n, int k) { most[k] = at_least(most[k], load_row(x + i, n)); });
  const V both = at_least(at_least(most[0], most[1]), at_least(most[2], most[3]));
  const V largest(across(both, [](A a, A b) { return a < b ? b : a; }));
  double total = 0;
  for (int64_t part = 0; part < size; part += kPart) {
    V sums[kTogether];
    for (V& s : sums) s = V(A(0));
    each_vector<A>(part, smaller(part + kPart, size), [&](int64_t i, int64_t n, int k) {
      const V e = exp_below(load_row(x + i, n) - largest);
      sums[k] += e;
      if constexpr (!narrow) store_some(y + i, e, n);
    });
    total += static_cast<double>(across((sums[0] + sums[1]) + (sums[2] + sums[3]), [](A a, A b) { return a + b; }));
  }
  const V factor(static_cast<A>(1 / total));
  each_vector<A>(0, size, [&](int64_t i, int64_t n, int) {
    if constexpr (narrow)
      store_some(y + i, exp_below(load_row(x + i, n) - largest) * factor, n);
    else
      store_some(y + i, load_some(y + i, n) * factor, n);
  });
}

// `vectors` neighbours, or one of n lanes, down the dimension.
template <int vectors, class T>
AI3_INLINE void softmax_columns(const SoftmaxProblem& p, const T* x, T* y, int64_t n) {
  using A = Acc<T>;
  using V = Vec<A>;
  constexpr bool narrow = sizeof(T) == 2, whole = vectors > 1;
  auto read = [&](const T* from, int64_t j, int v) { return load_some<whole>(from + j * p.inner + v * V::width, n); };
  auto write = [&](int64_t j, int v, V value) {
    T* const to = y + j * p.inner + v * V::width;
    whole ? store(to, value) : store_some(to, value, n);
  };
  V most[vectors], total[vectors];
  for (int v = 0; v < vectors; v++) most[v] = V(minus_infinity<A>()), total[v] = V(A(0));
  for (int64_t j = 0; j < p.size; j++)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) most[v] = at_least(most[v], read(x, j, v));
  for (int64_t part = 0; part < p.size; part += kTerms) {
    V sums[vectors];
    for (V& s : sums) s = V(A(0));
    for (int64_t j = part; j < smaller(part + kTerms, p.size); j++)
#pragma GCC unroll 4
      for (int v = 0; v < vectors; v++) {
        const V e = exp_below(read(x, j, v) - most[v]);
        sums[v] += e;
        if constexpr (!narrow) write(j, v, e);
      }
    for (int v = 0; v < vectors; v++) total[v] += sums[v];
  }
  for (V& t : total) t = V(A(1)) / t;
  for (int64_t j = 0; j < p.size; j++)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++)
      if constexpr (narrow)
        write(j, v, exp_below(read(x, j, v) - most[v]) * total[v]);
      else
        write(j, v, read(y, j, v) * total[v]);
}

template <class T>
void softmax_direct(const SoftmaxProblem& p, const T* x, T* y, Workspace&) {
  constexpr int64_t width = Vec<Acc<T>>::width, block = kTogether * width;
  if (p.inner == 1)
    return parallel_ranges(p.threads, p.outer, 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t r = begin; r < end; r++) softmax_row(x + r * p.size, y + r * p.size, p.size);
    });
  const int64_t blocks = ceil_div(p.inner, block);
  parallel_for(p.threads, p.outer * blocks, [&](int64_t item, int) {
    const int64_t first = item % blocks * block, at = item / blocks * p.size * p.inner + first;
    const int64_t count = smaller(block, p.inner - first);
    if (count == block) return softmax_columns<kTogether>(p, x + at, y + at, width);
    for (int64_t i = 0; i < count; i += width) softmax_columns<1>(p, x + at + i, y + at + i, smaller(width, count - i));
  });
}

AI3_ALGORITHM(softmax, direct, .accuracy = Accuracy::bounded, .error_bound = 4e-6)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

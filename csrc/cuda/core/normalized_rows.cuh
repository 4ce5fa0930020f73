// Rows that are normalized each by its own moments, a block of threads for each, forward and backward: as layer_norm and rms_norm
// take them. Of a problem P with `rows` and `features`, `centered` around their mean or around 0, and then without a bias. The
// gradients of weight and bias are sums over rows, each chunk of rows by its own, so that they are added in the same order every
// time.
#pragma once
#include "moments.cuh"

namespace ai3::inline AI3_LEVEL {

inline constexpr int kThreadsOfRow = 128;
template <class A>
constexpr int64_t kMomentsBytes = 2 * reduce_bytes<A>(kThreadsOfRow);

// W is the type of weight and bias.
template <bool centered, class T, class W>
__global__ void __launch_bounds__(kThreadsOfRow)
    normalized_rows(int64_t rows, int64_t features, double eps, const T* x, const W* w, const W* b, T* y) {
  using A = Acc<T>;
  A* const memory = shared<A>();
  for (int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
    const T* from = x + r * features;
    T* to = y + r * features;
    const Moments<A> of = moments_of<kThreadsOfRow, centered>(
        features, [=](int64_t i) { return load_acc(from + i); }, eps, memory);
    for (int64_t i = threadIdx.x; i < features; i += kThreadsOfRow)
      store_acc(to + i, of.normal(load_acc(from + i)) * (w ? static_cast<A>(load_acc(w + i)) : A(1)) +
                            (b ? static_cast<A>(load_acc(b + i)) : A(0)));
  }
}
template <class T, class P>
void normalize_rows(const P& p, const typename P::Operands& m, const Workspace& workspace, const char* what) {
  if (p.rows == 0 || p.features == 0) return;
  with_weight_type<T>(p.wide_weight, [&]<class W>() {
    const W *const w = m.weight.template read<W>(), *b = nullptr;
    if constexpr (P::centered) b = m.bias.template read<W>();
    launch(normalized_rows<P::centered, T, W>, {blocks_for(p.rows)}, kThreadsOfRow, kMomentsBytes<Acc<T>>, workspace, what,
           p.rows, p.features, p.eps, m.input.template read<T>(), w, b, m.output.template write<T>());
  });
}

// Gradients ----------------------------------------------------------------------------------------------------------------
// With g = dY * weight and h the normalized row: dX = scale * (g - mean(g) - h * mean(g * h)), without mean(g) where rows are not
// centered. Keeps each row's moments.
template <bool centered, class T, class W>
__global__ void __launch_bounds__(kThreadsOfRow) normalized_rows_backward(int64_t rows, int64_t features, double eps, const T* gy,
                                                                          const T* x, const W* w, T* gx, Moments<Acc<T>>* kept) {
  using A = Acc<T>;
  A* const memory = shared<A>();
  const A n = static_cast<A>(features);
  for (int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
    const T *const row = x + r * features, *const g = gy + r * features;
    const Moments<A> of = moments_of<kThreadsOfRow, centered>(
        features, [=](int64_t i) { return load_acc(row + i); }, eps, memory);
    if (kept && threadIdx.x == 0) kept[r] = of;
    if (!gx) continue;
    auto gradient = [&](int64_t i) { return load_acc(g + i) * (w ? static_cast<A>(load_acc(w + i)) : A(1)); };
    A means[2] = {0, 0};
    for (int64_t i = threadIdx.x; i < features; i += kThreadsOfRow)
      means[0] += gradient(i), means[1] += gradient(i) * of.normal(load_acc(row + i));
    reduce_each<kThreadsOfRow>(means, memory, Sum());
    const A first = centered ? means[0] / n : A(0), second = means[1] / n;
    for (int64_t i = threadIdx.x; i < features; i += kThreadsOfRow)
      store_acc(gx + r * features + i, of.scale_of_x * (gradient(i) - first - of.normal(load_acc(row + i)) * second));
  }
}

inline constexpr int64_t kRowsOfChunk = 64;
template <class P>
int64_t chunks_of(const P& p) {
  return ceil_div(p.rows, kRowsOfChunk);
}
template <class P>
bool wants_sums(const WeightedGradients& m) {
  return m.grad_weight || (P::centered && m.grad_bias);
}
template <class P>
int64_t rows_backward_workspace(const P& p, const WeightedGradients& m) {
  if (!wants_sums<P>(m)) return 0;
  return with_type(p.dtype, [&]<class T>() {
    return checked_add(piece_bytes<Moments<Acc<T>>>(p.rows), piece_bytes<Acc<T>>(checked_product({2, chunks_of(p), p.features})));
  });
}

template <class T, class W, class P>
void rows_backward_of(const P& p, const WeightedGradients& m, Workspace& workspace) {
  using A = Acc<T>;
  const int64_t rows = p.rows, features = p.features, chunks = chunks_of(p);
  const bool sums = wants_sums<P>(m);
  const T *const gy = m.grad_output.read<T>(), *const x = m.input.read<T>();
  Moments<A>* const kept = sums ? take<Moments<A>>(workspace, rows) : nullptr;
  launch(normalized_rows_backward<P::centered, T, W>, {blocks_for(rows)}, kThreadsOfRow, kMomentsBytes<A>, workspace,
         "a norm's gradients", rows, features, p.eps, gy, x, m.weight.read<W>(), m.grad_input.write<T>(), kept);
  if (!sums) return;
  A* const of_chunks = take<A>(workspace, 2 * chunks * features);
  for_each(chunks * features, workspace, "a norm's sums", [=] __device__(int64_t i) {
    const int64_t j = i % features, begin = i / features * kRowsOfChunk;
    const int64_t end = begin + kRowsOfChunk < rows ? begin + kRowsOfChunk : rows;
    A of_weight = 0, of_bias = 0;
    for (int64_t r = begin; r < end; r++) {
      const A g = load_acc(gy + r * features + j);
      of_weight += g * kept[r].normal(load_acc(x + r * features + j)), of_bias += g;
    }
    of_chunks[i] = of_weight, of_chunks[chunks * features + i] = of_bias;
  });
  W *const gw = m.grad_weight.write<W>(), *const gb = P::centered ? m.grad_bias.write<W>() : nullptr;
  for_each(features, workspace, "a norm's sums", [=] __device__(int64_t j) {
    A of_weight = 0, of_bias = 0;
    for (int64_t c = 0; c < chunks; c++)
      of_weight += of_chunks[c * features + j], of_bias += of_chunks[(chunks + c) * features + j];
    if (gw) store_acc(gw + j, static_cast<Acc<W>>(of_weight));
    if (gb) store_acc(gb + j, static_cast<Acc<W>>(of_bias));
  });
}
template <class P>
void rows_backward(const P& p, const WeightedGradients& m, Workspace& workspace) {
  with_type(p.dtype,
            [&]<class T>() { with_weight_type<T>(p.wide_weight, [&]<class W>() { rows_backward_of<T, W>(p, m, workspace); }); });
}

}  // namespace ai3::inline AI3_LEVEL

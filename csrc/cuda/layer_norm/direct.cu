// Layer normalization (Ba, Kiros & Hinton 2016), a block of threads for each row: its mean, then its variance around that, then
// what is written. Backward, too; the gradients of weight and bias are sums over rows, each chunk of rows by its own, so that
// they are added in the same order every time.
#include "../../algos/layer_norm/problem.h"
#include "../core/block.cuh"

namespace ai3::inline AI3_LEVEL {
namespace {

constexpr int kThreads = 128;

template <class A>
struct Moments {
  A mean, scale;
};
// Of a row, for every thread of its block.
template <class T>
__device__ __forceinline__ Moments<Acc<T>> moments_of(const T* row, int64_t features, Acc<T> eps, Acc<T>* memory) {
  using A = Acc<T>;
  const A n = static_cast<A>(features);
  A sum = 0, squares = 0;
  for (int64_t i = threadIdx.x; i < features; i += kThreads) sum += load_acc(row + i);
  const A mean = reduce<kThreads>(sum, memory, Sum()) / n;
  for (int64_t i = threadIdx.x; i < features; i += kThreads) {
    const A d = load_acc(row + i) - mean;
    squares += d * d;
  }
  return {mean, A(1) / static_cast<A>(sqrt(reduce<kThreads>(squares, memory, Sum()) / n + eps))};
}

// W is the type of weight and bias.
template <class T, class W>
__global__ void __launch_bounds__(kThreads)
    layer_norm_rows(int64_t rows, int64_t features, Acc<T> eps, const T* x, const W* w, const W* b, T* y) {
  using A = Acc<T>;
  A* const memory = shared<A>();
  for (int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
    const T* from = x + r * features;
    T* to = y + r * features;
    const Moments<A> of = moments_of(from, features, eps, memory);
    for (int64_t i = threadIdx.x; i < features; i += kThreads) {
      const A normal = (load_acc(from + i) - of.mean) * of.scale;
      store_acc(to + i, normal * (w ? static_cast<A>(load_acc(w + i)) : A(1)) + (b ? static_cast<A>(load_acc(b + i)) : A(0)));
    }
  }
}

template <class T>
void layer_norm_direct(const LayerNormProblem& p, const LayerNormOperands& m, Workspace& workspace) {
  if (p.rows == 0 || p.features == 0) return;
  const T* x = m.input.read<T>();
  auto run = [&]<class W>() {
    launch(layer_norm_rows<T, W>, {blocks_for(p.rows)}, kThreads, reduce_bytes<Acc<T>>(kThreads), workspace, "layer_norm_direct",
           p.rows, p.features, static_cast<Acc<T>>(p.eps), x, m.weight.read<W>(), m.bias.read<W>(), m.output.write<T>());
  };
  if constexpr (sizeof(T) == 2) {
    if (p.wide_weight) return run.template operator()<float>();
  }
  run.template operator()<T>();
}

// With g = dY * weight and h the normalized row: dX = scale * (g - mean(g) - h * mean(g * h)). Keeps each row's moments.
template <class T, class W>
__global__ void __launch_bounds__(kThreads) layer_norm_backward_rows(int64_t rows, int64_t features, Acc<T> eps, const T* gy,
                                                                     const T* x, const W* w, T* gx, Moments<Acc<T>>* kept) {
  using A = Acc<T>;
  A* const memory = shared<A>();
  const A n = static_cast<A>(features);
  for (int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
    const T *const row = x + r * features, *const g = gy + r * features;
    const Moments<A> of = moments_of(row, features, eps, memory);
    if (kept && threadIdx.x == 0) kept[r] = of;
    if (!gx) continue;
    auto gradient = [&](int64_t i) { return load_acc(g + i) * (w ? static_cast<A>(load_acc(w + i)) : A(1)); };
    auto normal = [&](int64_t i) { return (load_acc(row + i) - of.mean) * of.scale; };
    A first = 0, second = 0;
    for (int64_t i = threadIdx.x; i < features; i += kThreads) first += gradient(i), second += gradient(i) * normal(i);
    first = reduce<kThreads>(first, memory, Sum()) / n, second = reduce<kThreads>(second, memory, Sum()) / n;
    for (int64_t i = threadIdx.x; i < features; i += kThreads)
      store_acc(gx + r * features + i, of.scale * (gradient(i) - first - normal(i) * second));
  }
}

constexpr int64_t kRowsOfChunk = 64;
int64_t chunks_of(const LayerNormProblem& p) { return ceil_div(p.rows, kRowsOfChunk); }

int64_t backward_workspace(const LayerNormProblem& p, const WeightedGradients& m) {
  if (!m.grad_weight && !m.grad_bias) return 0;
  return with_type(p.dtype, [&]<class T>() {
    return checked_add(piece_bytes<Moments<Acc<T>>>(p.rows), piece_bytes<Acc<T>>(checked_product({2, chunks_of(p), p.features})));
  });
}

template <class T, class W>
void backward_of(const LayerNormProblem& p, const WeightedGradients& m, Workspace& workspace) {
  using A = Acc<T>;
  const int64_t rows = p.rows, features = p.features, chunks = chunks_of(p);
  const bool sums = m.grad_weight || m.grad_bias;
  const T *const gy = m.grad_output.read<T>(), *const x = m.input.read<T>();
  Moments<A>* const kept = sums ? take<Moments<A>>(workspace, rows) : nullptr;
  launch(layer_norm_backward_rows<T, W>, {blocks_for(rows)}, kThreads, reduce_bytes<A>(kThreads), workspace,
         "layer_norm's gradients", rows, features, static_cast<A>(p.eps), gy, x, m.weight.read<W>(), m.grad_input.write<T>(),
         kept);
  if (!sums) return;
  A* const of_chunks = take<A>(workspace, 2 * chunks * features);
  for_each(chunks * features, workspace, "layer_norm's sums", [=] __device__(int64_t i) {
    const int64_t j = i % features, begin = i / features * kRowsOfChunk;
    const int64_t end = begin + kRowsOfChunk < rows ? begin + kRowsOfChunk : rows;
    A of_weight = 0, of_bias = 0;
    for (int64_t r = begin; r < end; r++) {
      const A g = load_acc(gy + r * features + j);
      of_weight += g * (load_acc(x + r * features + j) - kept[r].mean) * kept[r].scale, of_bias += g;
    }
    of_chunks[i] = of_weight, of_chunks[chunks * features + i] = of_bias;
  });
  W *const gw = m.grad_weight.write<W>(), *const gb = m.grad_bias.write<W>();
  for_each(features, workspace, "layer_norm's sums", [=] __device__(int64_t j) {
    A of_weight = 0, of_bias = 0;
    for (int64_t c = 0; c < chunks; c++)
      of_weight += of_chunks[c * features + j], of_bias += of_chunks[(chunks + c) * features + j];
    if (gw) store_acc(gw + j, static_cast<Acc<W>>(of_weight));
    if (gb) store_acc(gb + j, static_cast<Acc<W>>(of_bias));
  });
}
void layer_norm_backward(const LayerNormProblem& p, const WeightedGradients& m, Workspace& workspace) {
  with_type(p.dtype, [&]<class T>() {
    if constexpr (sizeof(T) == 2) {
      if (p.wide_weight) return backward_of<T, float>(p, m, workspace);
    }
    backward_of<T, T>(p, m, workspace);
  });
}

GradientNames gradients(const LayerNormProblem&) { return {"direct", "direct"}; }

AI3_ALGORITHM(layer_norm, direct, .accuracy = Accuracy::bounded, .error_bound = 4e-6,
              .supports = device_supports<LayerNormProblem>, .gradients = gradients, .backward = layer_norm_backward,
              .backward_workspace = backward_workspace)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

// Layer normalization (Ba, Kiros & Hinton 2016), a block of threads for each row: its mean, then its variance around that, then
// what is written.
#include "../../algos/layer_norm/problem.h"
#include "../core/block.cuh"

namespace ai3::inline AI3_LEVEL {
namespace {

constexpr int kThreads = 128;

// W is the type of weight and bias.
template <class T, class W>
__global__ void __launch_bounds__(kThreads)
    layer_norm_rows(int64_t rows, int64_t features, Acc<T> eps, const T* x, const W* w, const W* b, T* y) {
  using A = Acc<T>;
  A* const memory = shared<A>();
  const A n = static_cast<A>(features);
  for (int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
    const T* from = x + r * features;
    T* to = y + r * features;
    A sum = 0, squares = 0;
    for (int64_t i = threadIdx.x; i < features; i += kThreads) sum += load_acc(from + i);
    const A mean = reduce<kThreads>(sum, memory, Sum()) / n;
    for (int64_t i = threadIdx.x; i < features; i += kThreads) {
      const A d = load_acc(from + i) - mean;
      squares += d * d;
    }
    const A scale = A(1) / sqrt(reduce<kThreads>(squares, memory, Sum()) / n + eps);
    for (int64_t i = threadIdx.x; i < features; i += kThreads) {
      const A normal = (load_acc(from + i) - mean) * scale;
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

AI3_ALGORITHM(layer_norm, direct, .accuracy = Accuracy::bounded, .error_bound = 4e-6,
              .supports = device_supports<LayerNormProblem>)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

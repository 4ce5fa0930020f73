// Softmax in three passes over what is normalized: the largest, the sum of powers, and what is written. Where it is contiguous, a
// block of threads takes a row; else a thread takes a column, so that neighbours read neighbouring memory.
#include "../../algos/softmax/problem.h"
#include "../core/block.cuh"

namespace ai3::inline AI3_LEVEL {
namespace {

template <class T>
__global__ void __launch_bounds__(kThreads) softmax_rows(int64_t rows, int64_t size, const T* x, T* y) {
  using A = Acc<T>;
  A* const memory = shared<A>();
  for (int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
    const T* from = x + r * size;
    T* to = y + r * size;
    A most = -INFINITY, sum = 0;
    for (int64_t i = threadIdx.x; i < size; i += kThreads) most = Largest()(most, load_acc(from + i));
    most = reduce<kThreads>(most, memory, Largest());
    for (int64_t i = threadIdx.x; i < size; i += kThreads) sum += exp(load_acc(from + i) - most);
    const A scale = A(1) / reduce<kThreads>(sum, memory, Sum());
    for (int64_t i = threadIdx.x; i < size; i += kThreads) store_acc(to + i, exp(load_acc(from + i) - most) * scale);
  }
}

// A warp for each row of up to 32 * kEach elements, which its lanes keep in registers: the row is read once, and no barrier
// waits.
template <class T, int kEach>
__global__ void __launch_bounds__(kThreads) softmax_short_rows(int64_t rows, int64_t size, const T* x, T* y) {
  using A = Acc<T>;
  const int64_t warps = kThreads / kWarp, lane = threadIdx.x % kWarp;
  for (int64_t r = blockIdx.x * warps + threadIdx.x / kWarp; r < rows; r += gridDim.x * warps) {
    A values[kEach];
    A most = -INFINITY, sum = 0;
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      const int64_t at = i * kWarp + lane;
      values[i] = at < size ? load_acc(x + r * size + at) : A(-INFINITY);
      most = Largest()(most, values[i]);
    }
    most = of_warp(most, Largest());
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      values[i] = i * kWarp + lane < size ? static_cast<A>(exp(values[i] - most)) : A(0);
      sum += values[i];
    }
    const A scale = A(1) / of_warp(sum, Sum());
#pragma unroll
    for (int i = 0; i < kEach; i++)
      if (i * kWarp + lane < size) store_acc(y + r * size + i * kWarp + lane, values[i] * scale);
  }
}

template <class T>
void softmax_direct(const SoftmaxProblem& p, const T* x, T* y, Workspace& workspace) {
  using A = Acc<T>;
  if (p.outer == 0 || p.size == 0 || p.inner == 0) return;
  auto short_rows = [&]<int each>() {
    launch(softmax_short_rows<T, each>, {blocks_for(ceil_div(p.outer, kThreads / kWarp))}, kThreads, 0, workspace,
           "softmax_direct", p.outer, p.size, x, y);
  };
  if (p.inner == 1 && p.size <= 2 * kWarp) return short_rows.template operator()<2>();
  if (p.inner == 1 && p.size <= 8 * kWarp) return short_rows.template operator()<8>();
  if (p.inner == 1 && p.size <= 32 * kWarp) return short_rows.template operator()<32>();
  if (p.inner == 1)
    return launch(softmax_rows<T>, {blocks_for(p.outer)}, kThreads, reduce_bytes<A>(kThreads), workspace, "softmax_direct",
                  p.outer, p.size, x, y);
  for_each(p.outer * p.inner, workspace, "softmax_direct", [=] __device__(int64_t i) {
    const int64_t first = i / p.inner * p.size * p.inner + i % p.inner;
    A most = -INFINITY, sum = 0;
    for (int64_t j = 0; j < p.size; j++) most = Largest()(most, load_acc(x + first + j * p.inner));
    for (int64_t j = 0; j < p.size; j++) sum += exp(load_acc(x + first + j * p.inner) - most);
    const A scale = A(1) / sum;
    for (int64_t j = 0; j < p.size; j++)
      store_acc(y + first + j * p.inner, exp(load_acc(x + first + j * p.inner) - most) * scale);
  });
}

AI3_ALGORITHM(softmax, direct, .accuracy = Accuracy::bounded, .error_bound = 4e-6, .supports = device_supports<SoftmaxProblem>)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

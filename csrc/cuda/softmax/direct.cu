// Softmax in three passes over what is normalized: the largest, the sum of powers, and what is written. Where it is contiguous, a
// block of threads takes a row; else a thread takes a column, so that neighbours read neighbouring memory.
#include "../../algos/softmax/problem.h"
#include "../core/block.cuh"

namespace ai3::inline AI3_LEVEL {
namespace {

constexpr int kThreads = 128;

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

template <class T>
void softmax_direct(const SoftmaxProblem& p, const T* x, T* y, Workspace& workspace) {
  using A = Acc<T>;
  if (p.outer == 0 || p.size == 0 || p.inner == 0) return;
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

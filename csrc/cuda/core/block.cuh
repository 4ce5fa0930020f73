// What the threads of one block work out together.
#pragma once
#include "device.cuh"

namespace ai3::inline AI3_LEVEL {

inline constexpr int kWarp = 32;
// Bytes of shared memory that `reduce` takes.
template <class A>
constexpr int64_t reduce_bytes(int threads) {
  return threads / kWarp * static_cast<int64_t>(sizeof(A));
}

// combine of the values of a warp's threads, for each of them.
template <class A, class Combine>
__device__ __forceinline__ A of_warp(A value, const Combine& combine) {
#pragma unroll
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) value = combine(value, __shfl_xor_sync(~0u, value, lanes));
  return value;
}

// combine(...combine(value of thread 0, value of thread 1)...), in an order that is always the same, for every thread of the
// block, all of which call it. `threads` is a multiple of 32; `memory` has room for one value of each warp.
template <int threads, class A, class Combine>
__device__ __forceinline__ A reduce(A value, A* memory, const Combine& combine) {
  static_assert(threads % kWarp == 0);
  value = of_warp(value, combine);
  __syncthreads();  // what an earlier call left in the memory has been read
  if (threadIdx.x % kWarp == 0) memory[threadIdx.x / kWarp] = value;
  __syncthreads();
  value = memory[0];
#pragma unroll
  for (int warp = 1; warp < threads / kWarp; warp++) value = combine(value, memory[warp]);
  return value;
}

// The same of each of n values, with the barriers of one; `memory` has room for n values of each warp.
template <int threads, int n, class A, class Combine>
__device__ __forceinline__ void reduce_each(A (&values)[n], A* memory, const Combine& combine) {
  static_assert(threads % kWarp == 0);
#pragma unroll
  for (A& value : values) value = of_warp(value, combine);
  __syncthreads();  // what an earlier call left in the memory has been read
#pragma unroll
  for (int j = 0; j < n; j++)
    if (threadIdx.x % kWarp == 0) memory[threadIdx.x / kWarp * n + j] = values[j];
  __syncthreads();
#pragma unroll
  for (int j = 0; j < n; j++) {
    values[j] = memory[j];
#pragma unroll
    for (int warp = 1; warp < threads / kWarp; warp++) values[j] = combine(values[j], memory[warp * n + j]);
  }
}

struct Sum {
  template <class A>
  __device__ __forceinline__ A operator()(A a, A b) const {
    return a + b;
  }
};
struct Largest {  // NaN only where nothing else is
  template <class A>
  __device__ __forceinline__ A operator()(A a, A b) const {
    return a > b ? a : b;
  }
};

// Blocks for `rows` of them: each block takes some where there are more than a grid has.
inline int64_t blocks_for(int64_t rows) { return rows < 1 << 20 ? rows : 1 << 20; }

}  // namespace ai3::inline AI3_LEVEL

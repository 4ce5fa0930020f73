// What the CUDA kernels share: storage types on the device, launches.
#pragma once
#include <cuda_fp16.h>

#include "host.h"

namespace ai3::inline AI3_LEVEL {

// Storage type -> accumulator, on the device. Not through __ldg: that cache does not see what the same launch writes, as one does
// whose output is its input.
__device__ __forceinline__ float load_acc(const float* p) { return *p; }
__device__ __forceinline__ double load_acc(const double* p) { return *p; }
__device__ __forceinline__ float load_acc(const bfloat16* p) { return __uint_as_float(static_cast<uint32_t>(p->bits) << 16); }
__device__ __forceinline__ float load_acc(const float16* p) { return __half2float(__ushort_as_half(p->bits)); }

__device__ __forceinline__ void store_acc(float* p, float v) { *p = v; }
__device__ __forceinline__ void store_acc(double* p, double v) { *p = v; }
__device__ __forceinline__ void store_acc(float16* p, float v) { p->bits = __half_as_ushort(__float2half_rn(v)); }
__device__ __forceinline__ void store_acc(bfloat16* p, float v) {  // to nearest even; NaN stays NaN
  const uint32_t u = __float_as_uint(v);
  p->bits = (u & 0x7fffffffu) > 0x7f800000u ? static_cast<uint16_t>(u >> 16 | 0x40u)
                                            : static_cast<uint16_t>((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}

inline constexpr int kBlock = 256;
inline constexpr int kThreads = 128;  // of blocks that reduce what they read, or whose threads keep much in registers

// The shared memory of a block, as many bytes as its launch asks for.
template <class T>
__device__ __forceinline__ T* shared() {
#ifdef __CUDACC__
  extern __shared__ __align__(16) char memory[];
#else
  char* const memory = fake::shared_memory;
#endif
  return reinterpret_cast<T*>(memory);
}

// kernel(arguments...) on a grid of blocks of `threads` threads.
struct Grid2 {
  int64_t x, y = 1;
};
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), Grid2 blocks, int threads, int64_t shared_bytes, const Workspace& workspace,
            const char* what, const Arguments&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim.x = static_cast<unsigned>(blocks.x), config.gridDim.y = static_cast<unsigned>(blocks.y);
  config.blockDim.x = static_cast<unsigned>(threads), config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream_of(workspace);
  check_cuda(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...), what);
}

// kernel(i) for i in [0, count), in a grid-stride loop: indices are 64 bits wide, grids are not.
template <class Body>
__global__ void __launch_bounds__(kBlock) for_each_kernel(int64_t count, Body body) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) body(i);
}
// Launched by the runtime's function rather than <<<...>>>, which only nvcc reads: so the tests build all of this for the host,
// where that function is a loop (tests/cpp/cuda).
template <class Body>
void for_each(int64_t count, const Workspace& workspace, const char* what, const Body& body) {
  if (count == 0) return;
  const int64_t blocks = ceil_div(count, kBlock), most = 1 << 20;
  launch(for_each_kernel<Body>, {blocks < most ? blocks : most}, kBlock, 0, workspace, what, count, body);
}

// As many elements as one access of a thread moves.
template <class T>
struct alignas(16) Wide {
  static constexpr int64_t kCount = 16 / static_cast<int64_t>(sizeof(T));
  T values[kCount];
};
// y[i] = f(x[i]), with 16 bytes for each thread where both begin at a multiple of those: y may be x.
template <class T, class F>
void map_elements(int64_t count, const T* x, T* y, const Workspace& workspace, const char* what, const F& f) {
  auto begins_whole = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % sizeof(Wide<T>) == 0; };
  const int64_t wide = begins_whole(x) && begins_whole(y) ? count / Wide<T>::kCount : 0, done = wide * Wide<T>::kCount;
  for_each(wide, workspace, what, [=] __device__(int64_t i) {
    Wide<T> each = reinterpret_cast<const Wide<T>*>(x)[i];
#pragma unroll
    for (int64_t j = 0; j < Wide<T>::kCount; j++) store_acc(each.values + j, f(load_acc(each.values + j)));
    reinterpret_cast<Wide<T>*>(y)[i] = each;
  });
  for_each(count - done, workspace, what, [=] __device__(int64_t i) { store_acc(y + done + i, f(load_acc(x + done + i))); });
}

// i / n and i % n of numbers that are not negative: in 32 bits where they fit, for which a GPU has instructions.
struct Quotient {
  int64_t quotient, rest;
};
__device__ __forceinline__ Quotient divided(int64_t i, int64_t n) {
  if ((i | n) >> 32 == 0) {
    const uint32_t a = static_cast<uint32_t>(i), b = static_cast<uint32_t>(n), q = a / b;
    return {q, a - q * b};
  }
  return {i / n, i % n};
}

// A flat index over (batch, channel, row, column), split so that neighbouring threads touch neighbouring memory.
struct Place {
  int64_t n, c, h, w;
};
__device__ __forceinline__ Place place_of(int64_t i, int64_t channels, int64_t height, int64_t width, bool channels_last) {
  Place at;
  auto next = [&](int64_t n) {
    const Quotient q = divided(i, n);
    i = q.quotient;
    return q.rest;
  };
  if (channels_last)
    at.c = next(channels), at.w = next(width), at.h = next(height), at.n = i;
  else
    at.w = next(width), at.h = next(height), at.c = next(channels), at.n = i;
  return at;
}
__device__ __forceinline__ int64_t offset_of(const Place& at, const Strides4& s) {
  return at.n * s.n + at.c * s.c + at.h * s.h + at.w * s.w;
}

// Every output's bias, onto which a product is then added, so that half types round once.
template <class Problem, class T>
void spread_bias(const Problem& p, const T* b, T* y, const Workspace& workspace, const char* what) {
  const int64_t channels = p.out_channels, pixels = p.out_height * p.out_width;
  const bool channels_last = p.y_stride.c == 1;
  for_each(p.batch * channels * pixels, workspace, what,
           [=] __device__(int64_t i) { y[i] = b[channels_last ? i % channels : i / pixels % channels]; });
}

}  // namespace ai3::inline AI3_LEVEL

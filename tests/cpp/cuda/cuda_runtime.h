// CUDA's runtime on the host, as far as csrc/cuda calls it: the threads of a launch run one after the other, those of a block as
// fibers, and all is done when it returns; memory is the host's. The names and types are CUDA's, so that the kernels are compiled
// as they are.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>

#include "fibers.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidConfiguration = 9, cudaErrorNoDevice = 100, cudaErrorLaunchFailure = 719 };
enum cudaDeviceAttr { cudaDevAttrComputeCapabilityMajor = 75, cudaDevAttrComputeCapabilityMinor = 76 };
enum cudaMemcpyKind { cudaMemcpyDeviceToDevice = 3 };
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal = 0, cudaStreamCaptureModeRelaxed = 2 };
enum cudaDataType { CUDA_R_32F = 0, CUDA_R_64F = 1, CUDA_R_16F = 2, CUDA_R_16BF = 14 };
using cudaStream_t = struct CUstream_st*;
struct cudaLaunchAttribute;
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  cudaLaunchAttribute* attrs = nullptr;
  unsigned numAttrs = 0;
};

// What tests set, and look at.
namespace fake {
inline int capability = 90;          // 10 * major + minor; 0: there is no device
inline thread_local int device = 0;  // the current one
inline thread_local cudaError_t last_error = cudaSuccess;
inline thread_local int64_t launches = 0;
inline thread_local bool fail_launches = false;
inline thread_local bool capturing = false;  // a stream of this thread
inline thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
inline thread_local cudaStream_t launch_stream = nullptr;  // of the last launch or copy
inline thread_local char* shared_memory = nullptr;         // of the block that runs: exactly as many bytes as were asked for
// What allocates or waits is not allowed in a capture but in the relaxed mode, and makes the capture fail.
inline bool forbidden() { return capturing && capture_mode != cudaStreamCaptureModeRelaxed; }
}  // namespace fake

inline const char* cudaGetErrorString(cudaError_t e) {
  return e == cudaErrorInvalidConfiguration ? "invalid configuration argument"
         : e == cudaErrorNoDevice           ? "no CUDA-capable device is detected"
         : e == cudaErrorLaunchFailure      ? "some threads of a block wait for others that never come"
                                            : "no error";
}
inline cudaError_t cudaGetLastError() {
  const cudaError_t e = fake::last_error;
  fake::last_error = cudaSuccess;
  return e;
}
inline cudaError_t cudaGetDevice(int* device) {
  *device = fake::device;
  return fake::last_error = fake::capability ? cudaSuccess : cudaErrorNoDevice;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? fake::capability / 10 : fake::capability % 10;
  return cudaSuccess;
}
inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, fake::capture_mode);
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  fake::launch_stream = stream;
  std::memset(to, value, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  fake::launch_stream = stream;
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments&&... arguments) {
  const dim3 grid = config->gridDim, block = config->blockDim;
  if (fake::fail_launches || grid.x == 0 || block.x == 0 || block.x > 1024 || grid.y == 0 || grid.y > 65535 ||
      grid.z * block.y * block.z != 1 || config->dynamicSmemBytes > 48 << 10)
    return fake::last_error = cudaErrorInvalidConfiguration;
  fake::launches++, fake::launch_stream = config->stream;
  gridDim = grid, blockDim = block;
  const size_t bytes = config->dynamicSmemBytes;
  auto release = [](char* p) { ::operator delete (p, std::align_val_t{16}); };
  const std::unique_ptr<char, decltype(release)> memory(static_cast<char*>(::operator new (bytes, std::align_val_t{16})),
                                                        release);
  fake::shared_memory = memory.get();
  for (blockIdx.y = 0; blockIdx.y < grid.y; blockIdx.y++)
    for (blockIdx.x = 0; blockIdx.x < grid.x; blockIdx.x++) {
      std::memset(memory.get(), 0xff, bytes);  // NaN: nothing is left there from the block before
      if (!fake::Block::run(block.x, [&] { kernel(arguments...); })) return fake::last_error = cudaErrorLaunchFailure;
    }
  return cudaSuccess;
}

inline float __uint_as_float(unsigned bits) {
  float f;
  std::memcpy(&f, &bits, sizeof(f));
  return f;
}
inline unsigned __float_as_uint(float f) {
  unsigned bits;
  std::memcpy(&bits, &f, sizeof(bits));
  return bits;
}
template <class T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
T max(T a, T b) {
  return a < b ? b : a;
}

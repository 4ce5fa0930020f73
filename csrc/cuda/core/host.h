// What algorithms on CUDA need on the host, by any compiler: streams, workspaces, errors, and which GPUs there is code for.
#pragma once
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "../../algos/core/algorithm.h"

namespace ai3::inline AI3_LEVEL {

inline cudaStream_t stream_of(const Workspace& workspace) { return static_cast<cudaStream_t>(workspace.stream); }

// Pieces of a workspace begin at multiples of 256 bytes, as cuBLAS and cuDNN want it: PyTorch's allocator aligns the first, and
// each is as long. The bytes that take<T>(workspace, count) uses:
template <class T>
int64_t piece_bytes(int64_t count) {
  return round_up(checked_mul(count, static_cast<int64_t>(sizeof(T))), 256);
}
template <class T>
T* take(Workspace& workspace, int64_t count) {
  return reinterpret_cast<T*>(workspace.take<char>(piece_bytes<T>(count)));
}

// What takes memory for each image or row goes through it in chunks of at most so many bytes.
#ifndef AI3_PATCH_BYTES  // tests have a smaller one
#define AI3_PATCH_BYTES (int64_t{256} << 20)
#endif
// How many of `most` that take so many bytes each are in a chunk: at least one.
inline int64_t in_a_chunk(int64_t bytes, int64_t most) {
  const int64_t count = bytes > 0 ? AI3_PATCH_BYTES / bytes : most;
  return count < 1 ? 1 : count < most ? count : most;
}

inline void check_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // the runtime keeps it, and the next kernel's caller would take it for its own
  throw std::runtime_error(std::string("ai3: ") + what + " failed: " + cudaGetErrorString(status));
}

// What the library has code for (cmake/cuda.cmake gives it): machine code runs on GPUs of the same major version that are no
// older, PTX on all that are no older, code for one architecture's own instructions on that one alone. A kernel on another GPU
// would fail.
#ifndef AI3_CUDA_CODE
#define AI3_CUDA_CODE AI3_REAL(80) AI3_REAL(90) AI3_PTX(120)
#endif
#define AI3_ONLY(capability) {capability, capability},
#define AI3_REAL(capability) {capability, capability / 10 * 10 + 9},
#define AI3_PTX(capability) {capability, INT32_MAX},
struct DeviceCode {
  int oldest, newest;
  constexpr bool runs_on(int capability) const { return capability >= oldest && capability <= newest; }
};
inline constexpr DeviceCode kDeviceCode[] = {AI3_CUDA_CODE};
// Of the current device, as 10 * major + minor; 0 where there is none to ask, as in a query without a GPU.
inline int current_capability() {
  int device = 0, major = 0, minor = 0;
  const bool told = cudaGetDevice(&device) == cudaSuccess &&
                    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
                    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess;
  if (!told) cudaGetLastError();  // the error is not the next kernel's
  return told ? 10 * major + minor : 0;
}
inline bool supports_capability(int capability, Reason& reason) {
  if (capability == 0) return true;
  int oldest = kDeviceCode[0].oldest;
  for (const DeviceCode& code : kDeviceCode) {
    if (code.runs_on(capability)) return true;
    if (code.oldest < oldest) oldest = code.oldest;
  }
  if (capability < oldest)
    return refuse(reason, "needs a GPU of compute capability %d.%d or later, got %d.%d", oldest / 10, oldest % 10,
                  capability / 10, capability % 10);
  return refuse(reason, "was built without code for GPUs of compute capability %d.%d (TORCH_CUDA_ARCH_LIST names those)",
                capability / 10, capability % 10);
}
// What every kernel here needs of the device.
template <class P>
bool device_supports(const P&, Reason& reason) {
  return supports_capability(current_capability(), reason);
}

}  // namespace ai3::inline AI3_LEVEL

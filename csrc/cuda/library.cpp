// Loading _C_cuda gives the registry of _C, which it links, this library's kernels.
#include <cuda_runtime.h>
#include <torch/csrc/stable/library.h>

#include <cstdio>

#include "../algos/core/algorithm.h"
#include "core/pytorch.h"

extern "C" {
extern const ai3::AlgorithmInfo* const __start_ai3_algorithms[];
extern const ai3::AlgorithmInfo* const __stop_ai3_algorithms[];
int ai3_register(const ai3::AlgorithmInfo* info, int replace, char* error, int64_t size);
void ai3_set_cuda(void* (*current_stream)(int32_t device), bool (*is_capturing)(void* stream));
}

namespace {

void* current_stream(int32_t device) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return stream;
}

bool is_capturing(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status) == cudaSuccess)
    return status != cudaStreamCaptureStatusNone;
  cudaGetLastError();  // the error is not the next kernel's
  return true;         // of the legacy stream while another one is captured
}

char failure[512];  // of the registration; an exception must not leave a library's constructor

[[gnu::constructor]] void load() {
  ai3_set_cuda(current_stream, is_capturing);
  for (auto a = __start_ai3_algorithms; a != __stop_ai3_algorithms && !*failure; a++)
    if (!ai3_register(*a, 0, failure, sizeof(failure)) && !*failure) std::snprintf(failure, sizeof(failure), "unknown failure");
}

}  // namespace

void* ai3::current_blas_handle() {
  void* handle = nullptr;
  TORCH_ERROR_CODE_CHECK(torch_get_current_cuda_blas_handle(&handle));
  return handle;
}

// Why the library could not register its kernels; empty when it could.
extern "C" [[gnu::visibility("default")]] const char* ai3_cuda_failure() { return failure; }

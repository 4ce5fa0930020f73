// One strided-batched GEMM through cuBLAS, with PyTorch's handle, in the precision that the problem asks for.
#pragma once
#include "device.cuh"

namespace ai3::inline AI3_LEVEL {

// Row-major C[m][n] (ldc) = sum over k of A[m][k] * B[k][n], `batch` times; a transposed operand is stored [k][m] or [n][k].
struct Gemm {
  int64_t m, n, k;
  const void* a;
  int64_t lda, stride_a;
  bool transpose_a;
  const void* b;
  int64_t ldb, stride_b;
  bool transpose_b;
  void* c;
  int64_t ldc, stride_c;
  int64_t batch;
  bool add;  // onto what c holds, before the sum is rounded
};

// What cuBLAS may split sums over. It is given from the call's workspace: with memory of its own, which calls on several streams
// share, or none, the order of its sums could be another one from call to call. The size is what NVIDIA recommends for the newest
// architectures (32 MiB for compute capability 9.0 and later, less for others).
#ifndef AI3_CUBLAS_WORKSPACE  // tests have a smaller one
#define AI3_CUBLAS_WORKSPACE (int64_t{32} << 20)
#endif
inline constexpr int64_t kCublasWorkspace = AI3_CUBLAS_WORKSPACE;

// Whether cuBLAS counts that far: the sizes of its matrices, of which -1 is not known.
inline bool cublas_supports(std::initializer_list<int64_t> sizes, Reason& reason) {
  for (int64_t size : sizes)
    if (size > INT32_MAX)
      return refuse(reason, "needs matrices of at most %d rows and columns for cuBLAS, got %lld", INT32_MAX,
                    static_cast<long long>(size));
  return true;
}

// Accumulates in float32 (float64 for float64); TF32 only where allow_tf32. `scratch` has kCublasWorkspace bytes. Throws
// std::runtime_error.
void cublas_gemm(DType dtype, bool allow_tf32, const Gemm& g, void* scratch);

}  // namespace ai3::inline AI3_LEVEL

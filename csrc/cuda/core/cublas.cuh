// One strided-batched GEMM through cuBLAS, with PyTorch's handle, in the precision that the problem asks for.
#pragma once
#include <cublas_v2.h>

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

// Accumulates in float32 (float64 for float64); TF32 only where allow_tf32. Throws std::runtime_error.
void cublas_gemm(DType dtype, bool allow_tf32, const Gemm& g);

}  // namespace ai3::inline AI3_LEVEL

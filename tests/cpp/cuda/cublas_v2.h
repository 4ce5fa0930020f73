// cuBLAS on the host, as far as csrc/cuda calls it: a naive GEMM, and a handle that keeps what cuBLAS's keeps.
#pragma once
#include "../../../csrc/algos/core/algorithm.h"
#include "cuda_runtime.h"

enum cublasStatus_t { CUBLAS_STATUS_SUCCESS = 0, CUBLAS_STATUS_INVALID_VALUE = 7, CUBLAS_STATUS_NOT_SUPPORTED = 15 };
enum cublasOperation_t { CUBLAS_OP_N = 0, CUBLAS_OP_T = 1 };
enum cublasMath_t {
  CUBLAS_DEFAULT_MATH = 0,
  CUBLAS_TF32_TENSOR_OP_MATH = 3,
  CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION = 16
};
enum cublasComputeType_t { CUBLAS_COMPUTE_32F = 68, CUBLAS_COMPUTE_32F_FAST_TF32 = 77, CUBLAS_COMPUTE_64F = 70 };
enum cublasGemmAlgo_t { CUBLAS_GEMM_DEFAULT = -1 };

namespace fake {
struct Blas {
  cudaStream_t stream = nullptr;
  cublasMath_t math = CUBLAS_DEFAULT_MATH;
  char* workspace = nullptr;  // setting a stream takes it back, as cuBLAS says
  size_t workspace_bytes = 0;
  // Of the last product.
  int64_t products = 0;
  cublasMath_t math_used = CUBLAS_DEFAULT_MATH;
  cublasComputeType_t compute_used = CUBLAS_COMPUTE_32F;
  cudaStream_t stream_used = nullptr;
  const void* workspace_used = nullptr;
};
inline thread_local Blas blas;
}  // namespace fake
using cublasHandle_t = fake::Blas*;

inline const char* cublasGetStatusString(cublasStatus_t s) {
  return s == CUBLAS_STATUS_NOT_SUPPORTED ? "CUBLAS_STATUS_NOT_SUPPORTED"
         : s                              ? "CUBLAS_STATUS_INVALID_VALUE"
                                          : "CUBLAS_STATUS_SUCCESS";
}
inline cublasStatus_t cublasGetMathMode(cublasHandle_t h, cublasMath_t* mode) {
  *mode = h->math;
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasSetMathMode(cublasHandle_t h, cublasMath_t mode) {
  h->math = mode;
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasGetStream(cublasHandle_t h, cudaStream_t* stream) {
  *stream = h->stream;
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasSetStream(cublasHandle_t h, cudaStream_t stream) {
  h->stream = stream, h->workspace = nullptr, h->workspace_bytes = 0;
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasSetWorkspace(cublasHandle_t h, void* workspace, size_t bytes) {
  h->workspace = static_cast<char*>(workspace), h->workspace_bytes = bytes;
  return CUBLAS_STATUS_SUCCESS;
}

inline int size_of(cudaDataType type) { return type == CUDA_R_64F ? 8 : type == CUDA_R_32F ? 4 : 2; }
inline ai3::DType dtype_of(cudaDataType type) {
  return type == CUDA_R_64F   ? ai3::DType::f64
         : type == CUDA_R_32F ? ai3::DType::f32
         : type == CUDA_R_16F ? ai3::DType::f16
                              : ai3::DType::bf16;
}

// Column-major C = alpha op(A) op(B) + beta C, `batch` times. Without a
// workspace its sums would have no fixed order: it fails.
inline cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t h, cublasOperation_t transpose_a, cublasOperation_t transpose_b,
                                                 int m, int n, int k, const void* alpha, const void* a, cudaDataType type_a,
                                                 int lda, long long stride_a, const void* b, cudaDataType type_b, int ldb,
                                                 long long stride_b, const void* beta, void* c, cudaDataType type_c, int ldc,
                                                 long long stride_c, int batch, cublasComputeType_t compute, cublasGemmAlgo_t) {
  const bool ta = transpose_a == CUBLAS_OP_T, tb = transpose_b == CUBLAS_OP_T;
  if (m < 0 || n < 0 || k < 0 || batch < 0 || lda < (ta ? k : m) || ldb < (tb ? n : k) || ldc < m || type_a != type_b ||
      (type_a != type_c && (size_of(type_a) != 2 || type_c != CUDA_R_32F)) ||
      (compute == CUBLAS_COMPUTE_64F) != (type_a == CUDA_R_64F) || !h->workspace || !h->workspace_bytes ||
      reinterpret_cast<uintptr_t>(h->workspace) % 256 != 0)
    return CUBLAS_STATUS_INVALID_VALUE;
  std::memset(h->workspace, 0xff, 1), std::memset(h->workspace + h->workspace_bytes - 1, 0xff, 1);
  h->products++, h->math_used = h->math, h->compute_used = compute, h->stream_used = h->stream, h->workspace_used = h->workspace;
  auto multiply = [&]<class T, class C>() {
    using A = ai3::Acc<T>;
    const A scale = *static_cast<const A*>(alpha), kept = *static_cast<const A*>(beta);
    for (int64_t z = 0; z < batch; z++) {
      const T *az = static_cast<const T*>(a) + z * stride_a, *bz = static_cast<const T*>(b) + z * stride_b;
      C* cz = static_cast<C*>(c) + z * stride_c;
      for (int64_t j = 0; j < n; j++)
        for (int64_t i = 0; i < m; i++) {
          A sum = 0;
          for (int64_t l = 0; l < k; l++)
            sum += ai3::widen(az[ta ? i * lda + l : l * lda + i]) * ai3::widen(bz[tb ? l * ldb + j : j * ldb + l]);
          C& out = cz[j * ldc + i];
          out = ai3::narrowed<C>(scale * sum + (kept == 0 ? A(0) : kept * ai3::widen(out)));
        }
    }
  };
  ai3::with_type(dtype_of(type_a), [&]<class T>() {
    type_c == type_a ? multiply.template operator()<T, T>() : multiply.template operator()<T, ai3::Acc<T>>();
  });
  return CUBLAS_STATUS_SUCCESS;
}

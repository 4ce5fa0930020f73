// Products through cuBLAS and cublasLt, with PyTorch's handle, in the precision that the problem asks for.
#pragma once
#include "host.h"

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
  bool add;  // onto what c holds; of 16 bits cuBLAS may round the sum before (seen on a GPU), so that a bias is added to `sums`
};

// Bytes of what cuBLAS may split sums over. A call gives it from its workspace: with memory of its own, which calls on several
// streams share, or none, the order of its sums could be another one from call to call. As many as PyTorch gives it:
// CUBLAS_WORKSPACE_CONFIG, else 32 MiB for compute capability 9.0 and later and 8.1 MiB for others.
int64_t cublas_workspace();

// Whether cuBLAS counts that far: the sizes of its matrices, of which -1 is not known.
inline bool cublas_supports(std::initializer_list<int64_t> sizes, Reason& reason) {
  for (int64_t size : sizes)
    if (size > INT32_MAX)
      return refuse(reason, "needs matrices of at most %d rows and columns for cuBLAS, got %lld", INT32_MAX,
                    static_cast<long long>(size));
  return true;
}

// Products of a and b of `dtype` into c of `sums`: of the same or, of 16-bit types, of float32. Accumulates in float32 (float64
// for float64); TF32 only where allow_tf32. `scratch` has cublas_workspace() bytes. Throws std::runtime_error.
void cublas_gemm(DType dtype, DType sums, bool allow_tf32, const Gemm& g, void* scratch);
inline void cublas_gemm(DType dtype, bool allow_tf32, const Gemm& g, void* scratch) {
  cublas_gemm(dtype, dtype, allow_tf32, g, scratch);
}

// Row-major c[m][n] = bias[n] + sum over k of a[m][k] * b[n][k], without gaps; no bias where that is null.
struct BiasedProduct {
  int64_t m, n, k;
  const void *a, *b, *bias;
  void* c;
};
// As cublas_gemm, through cublasLt, whose store adds the bias: onto sums of 16 bits perhaps rounded ones, which is not known.
// Every part of a sum is added in the type that it is accumulated in.
void cublaslt_product(DType dtype, DType sums, bool allow_tf32, const BiasedProduct& g, void* scratch, void* stream);

}  // namespace ai3::inline AI3_LEVEL

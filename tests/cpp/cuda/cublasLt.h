// cublasLt on the host, as far as csrc/cuda calls it: a naive product. Its heuristic counts on the alignment and the workspace
// that it is told of, as the real one does; a product that has less fails.
#pragma once
#include "cublas_v2.h"

enum cublasLtMatmulDescAttributes_t {
  CUBLASLT_MATMUL_DESC_TRANSA = 3,
  CUBLASLT_MATMUL_DESC_EPILOGUE = 7,
  CUBLASLT_MATMUL_DESC_BIAS_POINTER = 8
};
enum cublasLtMatmulPreferenceAttributes_t {
  CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES = 1,
  CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK = 3,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES = 5,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES = 6,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES = 7,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES = 8
};
enum cublasLtEpilogue_t { CUBLASLT_EPILOGUE_DEFAULT = 1, CUBLASLT_EPILOGUE_BIAS = 4 };
enum cublasLtReductionScheme_t { CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE = 2, CUBLASLT_REDUCTION_SCHEME_MASK = 7 };

struct cublasLtMatrixLayoutOpaque_t {
  cudaDataType type;
  int64_t rows, columns, ld;
};
struct cublasLtMatmulDescOpaque_t {
  cublasComputeType_t compute;
  cudaDataType scale;
  cublasOperation_t transpose_a = CUBLAS_OP_N;
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  const char* bias = nullptr;
};
struct cublasLtMatmulPreferenceOpaque_t {
  uint64_t workspace = 0;
  uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_MASK;
  uint32_t alignment[4] = {256, 256, 256, 256};  // of A, B, C, D
};
using cublasLtMatmulAlgo_t = cublasLtMatmulPreferenceOpaque_t;
struct cublasLtMatmulHeuristicResult_t {
  cublasLtMatmulAlgo_t algo;
  size_t workspaceSize;
  cublasStatus_t state;
};

namespace fake {
struct Lt {
  int64_t descriptors = 0;  // that are not yet destroyed
  bool refuses = false;
  // Of the last product.
  int64_t products = 0;
  cublasComputeType_t compute_used = CUBLAS_COMPUTE_32F;
  cudaStream_t stream_used = nullptr;
  const void *workspace_used = nullptr, *bias_used = nullptr;
  cublasLtMatmulAlgo_t algorithm_used;
};
inline thread_local Lt lt;
}  // namespace fake
using cublasLtHandle_t = fake::Blas*;

inline cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayoutOpaque_t** layout, cudaDataType type, uint64_t rows,
                                                 uint64_t columns, int64_t ld) {
  fake::lt.descriptors++;
  *layout = new cublasLtMatrixLayoutOpaque_t{type, static_cast<int64_t>(rows), static_cast<int64_t>(columns), ld};
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDescOpaque_t** product, cublasComputeType_t compute,
                                               cudaDataType scale) {
  fake::lt.descriptors++;
  *product = new cublasLtMatmulDescOpaque_t{compute, scale};
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreferenceOpaque_t** preference) {
  fake::lt.descriptors++;
  *preference = new cublasLtMatmulPreferenceOpaque_t;
  return CUBLAS_STATUS_SUCCESS;
}
namespace fake {
template <class T>
cublasStatus_t lt_destroy(T* descriptor) {
  lt.descriptors--;
  delete descriptor;
  return CUBLAS_STATUS_SUCCESS;
}
template <class T>
cublasStatus_t lt_assign(T& to, const void* value, size_t bytes) {
  if (bytes != sizeof(T)) return CUBLAS_STATUS_INVALID_VALUE;
  std::memcpy(&to, value, bytes);
  return CUBLAS_STATUS_SUCCESS;
}
}  // namespace fake
inline cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayoutOpaque_t* layout) { return fake::lt_destroy(layout); }
inline cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDescOpaque_t* product) { return fake::lt_destroy(product); }
inline cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreferenceOpaque_t* preference) {
  return fake::lt_destroy(preference);
}
inline cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDescOpaque_t* p, cublasLtMatmulDescAttributes_t attribute,
                                                     const void* value, size_t bytes) {
  switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA: return fake::lt_assign(p->transpose_a, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE: return fake::lt_assign(p->epilogue, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER: return fake::lt_assign(p->bias, value, bytes);
  }
  return CUBLAS_STATUS_INVALID_VALUE;
}
inline cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreferenceOpaque_t* p,
                                                           cublasLtMatmulPreferenceAttributes_t attribute, const void* value,
                                                           size_t bytes) {
  switch (attribute) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES: return fake::lt_assign(p->workspace, value, bytes);
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK: return fake::lt_assign(p->schemes, value, bytes);
    default: return fake::lt_assign(p->alignment[attribute - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES], value, bytes);
  }
}

inline cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, const cublasLtMatmulDescOpaque_t* p,
                                                     const cublasLtMatrixLayoutOpaque_t* a, const cublasLtMatrixLayoutOpaque_t* b,
                                                     const cublasLtMatrixLayoutOpaque_t* c, const cublasLtMatrixLayoutOpaque_t* d,
                                                     const cublasLtMatmulPreferenceOpaque_t* preference, int asked,
                                                     cublasLtMatmulHeuristicResult_t* results, int* found) {
  *found = 0;
  const bool narrow = size_of(a->type) == 2, wide = a->type == CUDA_R_64F, transposed = p->transpose_a == CUBLAS_OP_T;
  const int64_t m = transposed ? a->columns : a->rows, k = transposed ? a->rows : a->columns;
  for (const auto* l : {a, b, c, d})
    if (l->rows < 1 || l->columns < 1 || l->ld < l->rows) return CUBLAS_STATUS_INVALID_VALUE;
  if (handle != &fake::blas || asked != 1 || b->rows != k || d->rows != m || d->columns != b->columns || c->rows != d->rows ||
      c->columns != d->columns || a->type != b->type || c->type != d->type ||
      (d->type != a->type && (!narrow || d->type != CUDA_R_32F)) || (p->compute == CUBLAS_COMPUTE_64F) != wide ||
      p->scale != (wide ? CUDA_R_64F : CUDA_R_32F) || (p->epilogue == CUBLASLT_EPILOGUE_BIAS) != (p->bias != nullptr))
    return CUBLAS_STATUS_INVALID_VALUE;
  if (fake::lt.refuses) return CUBLAS_STATUS_NOT_SUPPORTED;
  *results = {*preference, preference->workspace, CUBLAS_STATUS_SUCCESS};
  *found = 1;
  return CUBLAS_STATUS_SUCCESS;
}

// Column-major D = op(A) B + the bias of each row.
inline cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, const cublasLtMatmulDescOpaque_t* p, const void* alpha,
                                     const void* a, const cublasLtMatrixLayoutOpaque_t* of_a, const void* b,
                                     const cublasLtMatrixLayoutOpaque_t* of_b, const void* beta, const void* c,
                                     const cublasLtMatrixLayoutOpaque_t* of_c, void* d, const cublasLtMatrixLayoutOpaque_t* of_d,
                                     const cublasLtMatmulAlgo_t* algorithm, void* workspace, size_t bytes, cudaStream_t stream) {
  auto is_aligned = [](const void* pointer, uint64_t to) { return reinterpret_cast<uintptr_t>(pointer) % to == 0; };
  if (handle != &fake::blas || bytes < algorithm->workspace || !is_aligned(workspace, 256) ||
      !is_aligned(a, algorithm->alignment[0]) || !is_aligned(b, algorithm->alignment[1]) ||
      !is_aligned(c, algorithm->alignment[2]) || !is_aligned(d, algorithm->alignment[3]) ||
      !is_aligned(p->bias, algorithm->alignment[3]) || of_c->type != of_d->type)
    return CUBLAS_STATUS_INVALID_VALUE;
  char* const scratch = static_cast<char*>(workspace);
  if (algorithm->workspace) std::memset(scratch, 0xff, 1), std::memset(scratch + algorithm->workspace - 1, 0xff, 1);
  fake::lt.products++, fake::lt.compute_used = p->compute, fake::lt.stream_used = stream, fake::lt.workspace_used = workspace;
  fake::lt.bias_used = p->bias, fake::lt.algorithm_used = *algorithm;
  const bool transposed = p->transpose_a == CUBLAS_OP_T;
  auto multiply = [&]<class T, class D>() {
    using A = ai3::Acc<T>;
    const T *x = static_cast<const T*>(a), *y = static_cast<const T*>(b);
    const D* const bias = reinterpret_cast<const D*>(p->bias);
    if (*static_cast<const A*>(alpha) != 1 || *static_cast<const A*>(beta) != 0) return false;
    for (int64_t j = 0; j < of_d->columns; j++)
      for (int64_t i = 0; i < of_d->rows; i++) {
        A sum = 0;
        for (int64_t l = 0; l < of_b->rows; l++)
          sum += ai3::widen(x[transposed ? i * of_a->ld + l : l * of_a->ld + i]) * ai3::widen(y[j * of_b->ld + l]);
        static_cast<D*>(d)[j * of_d->ld + i] = ai3::narrowed<D>(bias ? sum + ai3::widen(bias[i]) : sum);
      }
    return true;
  };
  const bool done = ai3::with_type(dtype_of(of_a->type), [&]<class T>() {
    return of_d->type == of_a->type ? multiply.template operator()<T, T>() : multiply.template operator()<T, ai3::Acc<T>>();
  });
  return done ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}

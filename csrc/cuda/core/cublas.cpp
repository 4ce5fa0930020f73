#include "cublas.cuh"

#include <cublasLt.h>
#include <cublas_v2.h>

#include <algorithm>
#include <cstdlib>
#include <type_traits>

#include "pytorch.h"

namespace ai3::inline AI3_LEVEL {
namespace {

void check(cublasStatus_t status, const char* what) {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw std::runtime_error(std::string("ai3: ") + what + ": " + cublasGetStatusString(status));
}

// The handle is PyTorch's, so its math mode must be as it was afterwards.
class MathMode {
 public:
  MathMode(cublasHandle_t handle, cublasMath_t mode) : handle_(handle) {
    check(cublasGetMathMode(handle, &before_), "cublasGetMathMode");
    check(cublasSetMathMode(handle, mode), "cublasSetMathMode");
  }
  ~MathMode() { cublasSetMathMode(handle_, before_); }
  MathMode(const MathMode&) = delete;
  MathMode& operator=(const MathMode&) = delete;

 private:
  cublasHandle_t handle_;
  cublasMath_t before_;
};

// Gives the handle the call's workspace. Setting a stream takes it back, so that later calls of PyTorch do not write there; the
// stream is the one that PyTorch set when it was asked for the handle.
class GivenWorkspace {
 public:
  GivenWorkspace(cublasHandle_t handle, void* scratch) : handle_(handle) {
    check(cublasGetStream(handle, &stream_), "cublasGetStream");
    check(cublasSetWorkspace(handle, scratch, static_cast<size_t>(cublas_workspace())), "cublasSetWorkspace");
  }
  ~GivenWorkspace() { cublasSetStream(handle_, stream_); }
  GivenWorkspace(const GivenWorkspace&) = delete;
  GivenWorkspace& operator=(const GivenWorkspace&) = delete;

 private:
  cublasHandle_t handle_;
  cudaStream_t stream_ = nullptr;
};

int narrow_size(int64_t size) {
  if (size > INT32_MAX) throw std::runtime_error("ai3: a matrix of this problem is too large for cuBLAS");
  return static_cast<int>(size);
}

cudaDataType type_of(DType dtype) {
  return dtype == DType::f64 ? CUDA_R_64F : dtype == DType::f32 ? CUDA_R_32F : dtype == DType::bf16 ? CUDA_R_16BF : CUDA_R_16F;
}

cublasComputeType_t compute_type(DType dtype, bool allow_tf32) {
  if (dtype == DType::f64) return CUBLAS_COMPUTE_64F;
  return dtype == DType::f32 && allow_tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
}

// A descriptor of cublasLt, until the end of the block.
template <class T, cublasStatus_t (*destroy)(T*)>
class Described {
 public:
  template <class... Arguments>
  explicit Described(cublasStatus_t (*create)(T**, Arguments...), std::type_identity_t<Arguments>... arguments) {
    check(create(&handle_, arguments...), "a descriptor of cublasLt");
  }
  ~Described() { destroy(handle_); }
  Described(const Described&) = delete;
  Described& operator=(const Described&) = delete;
  operator T*() const { return handle_; }  // NOLINT: as cublasLt takes it

 private:
  T* handle_ = nullptr;
};
using LtMatrix = Described<cublasLtMatrixLayoutOpaque_t, cublasLtMatrixLayoutDestroy>;
using LtProduct = Described<cublasLtMatmulDescOpaque_t, cublasLtMatmulDescDestroy>;
using LtPreference = Described<cublasLtMatmulPreferenceOpaque_t, cublasLtMatmulPreferenceDestroy>;
template <class T>
void set(const LtProduct& product, cublasLtMatmulDescAttributes_t attribute, const T& value) {
  check(cublasLtMatmulDescSetAttribute(product, attribute, &value, sizeof(value)), "cublasLtMatmulDescSetAttribute");
}
template <class T>
void set(const LtPreference& preference, cublasLtMatmulPreferenceAttributes_t attribute, const T& value) {
  check(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)),
        "cublasLtMatmulPreferenceSetAttribute");
}
// The largest power of two up to 256 of which an address is a multiple: what cublasLt takes for granted unless told.
uint32_t alignment_of(const void* p) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(p) | 256;
  return static_cast<uint32_t>(address & (~address + 1));
}

}  // namespace

int64_t cublas_workspace() {
  // ":4096:2:16:8": two pieces of 4096 KiB and eight of 16.
  if (const char* text = std::getenv("CUBLAS_WORKSPACE_CONFIG")) {
    int64_t bytes = 0;
    while (*text == ':') {
      char* end;
      const int64_t size = std::strtoll(text + 1, &end, 10);
      if (*end != ':') break;
      bytes = checked_add(bytes, checked_product({size, std::strtoll(end + 1, &end, 10), 1024}));
      text = end;
    }
    if (bytes > 0 && bytes < int64_t{1} << 40) return round_up(bytes, 256);
  }
  return current_capability() >= 90 ? int64_t{32} << 20 : int64_t{8320} << 10;
}

void cublas_gemm(DType dtype, DType sums, bool allow_tf32, const Gemm& g, void* scratch) {
  if (g.m == 0 || g.n == 0 || g.batch == 0) return;
  const auto handle = static_cast<cublasHandle_t>(current_blas_handle());
  const GivenWorkspace workspace(handle, scratch);
  const MathMode mode(handle, static_cast<cublasMath_t>((allow_tf32 ? CUBLAS_TF32_TENSOR_OP_MATH : CUBLAS_DEFAULT_MATH) |
                                                        CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION));
  const cudaDataType type = type_of(dtype);
  const double one64 = 1, added64 = g.add;
  const float one32 = 1, added32 = g.add;
  const bool wide = dtype == DType::f64;
  // cuBLAS is column-major: the row-major product is that of the transposed operands in the other order.
  check(cublasGemmStridedBatchedEx(handle, g.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N, g.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N,
                                   narrow_size(g.n), narrow_size(g.m), narrow_size(g.k),
                                   wide ? static_cast<const void*>(&one64) : &one32, g.b, type, narrow_size(g.ldb), g.stride_b,
                                   g.a, type, narrow_size(g.lda), g.stride_a,
                                   wide ? static_cast<const void*>(&added64) : &added32, g.c, type_of(sums), narrow_size(g.ldc),
                                   g.stride_c, narrow_size(g.batch), compute_type(dtype, allow_tf32), CUBLAS_GEMM_DEFAULT),
        "cublasGemmStridedBatchedEx");
}

void cublaslt_product(DType dtype, DType sums, bool allow_tf32, const BiasedProduct& g, void* scratch, void* stream) {
  if (g.m == 0 || g.n == 0) return;
  // PyTorch's handle of cuBLAS is one of cublasLt as well. Column-major: c's rows are its columns, of which each is b^T times one
  // of a's.
  const auto handle = static_cast<cublasLtHandle_t>(current_blas_handle());
  const bool wide = dtype == DType::f64;
  const double one64 = 1, none64 = 0;
  const float one32 = 1, none32 = 0;
  auto matrix = [](DType type, int64_t rows, int64_t columns) {
    return LtMatrix(cublasLtMatrixLayoutCreate, type_of(type), static_cast<uint64_t>(rows), static_cast<uint64_t>(columns), rows);
  };
  const LtMatrix a = matrix(dtype, g.k, g.n), b = matrix(dtype, g.k, g.m), c = matrix(sums, g.n, g.m);
  const LtProduct product(cublasLtMatmulDescCreate, compute_type(dtype, allow_tf32), wide ? CUDA_R_64F : CUDA_R_32F);
  set(product, CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
  if (g.bias) {
    set(product, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
    set(product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, g.bias);
  }
  const LtPreference preference(cublasLtMatmulPreferenceCreate);
  set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(cublas_workspace()));
  set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment_of(g.b));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment_of(g.a));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment_of(g.c));
  const uint32_t of_c = alignment_of(g.c);  // a bias, which is read beside it, has none of its own
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, g.bias ? std::min(of_c, alignment_of(g.bias)) : of_c);
  cublasLtMatmulHeuristicResult_t found{};
  int count = 0;
  check(cublasLtMatmulAlgoGetHeuristic(handle, product, a, b, c, c, preference, 1, &found, &count),
        "cublasLtMatmulAlgoGetHeuristic");
  check(count == 0 ? CUBLAS_STATUS_NOT_SUPPORTED : found.state, "cublasLtMatmulAlgoGetHeuristic");
  auto scale = [&](const double& of64, const float& of32) { return wide ? static_cast<const void*>(&of64) : &of32; };
  check(cublasLtMatmul(handle, product, scale(one64, one32), g.b, a, g.a, b, scale(none64, none32), g.c, c, g.c, c, &found.algo,
                       scratch, static_cast<size_t>(cublas_workspace()), static_cast<cudaStream_t>(stream)),
        "cublasLtMatmul");
}

}  // namespace ai3::inline AI3_LEVEL

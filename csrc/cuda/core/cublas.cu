#include <cublas_v2.h>

#include <algorithm>
#include <cstdlib>

#include "cublas.cuh"
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
  const cublasComputeType_t compute = wide                                ? CUBLAS_COMPUTE_64F
                                      : dtype == DType::f32 && allow_tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32
                                                                          : CUBLAS_COMPUTE_32F;
  // cuBLAS is column-major: the row-major product is that of the transposed operands in the other order.
  check(cublasGemmStridedBatchedEx(
            handle, g.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N, g.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N, narrow_size(g.n),
            narrow_size(g.m), narrow_size(g.k), wide ? static_cast<const void*>(&one64) : &one32, g.b, type, narrow_size(g.ldb),
            g.stride_b, g.a, type, narrow_size(g.lda), g.stride_a, wide ? static_cast<const void*>(&added64) : &added32, g.c,
            type_of(sums), narrow_size(g.ldc), g.stride_c, narrow_size(g.batch), compute, CUBLAS_GEMM_DEFAULT),
        "cublasGemmStridedBatchedEx");
}

}  // namespace ai3::inline AI3_LEVEL

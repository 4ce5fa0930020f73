// y = x w^T + b by cuBLAS.
#include "../../algos/linear/problem.h"
#include "../core/cublas.cuh"

namespace ai3::inline AI3_LEVEL {
namespace {

template <class T>
void linear_gemm(const LinearProblem& p, const T* x, const T* w, const T* b, T* y, Workspace& workspace) {
  // The bias is what the product is added onto, so that half types round once.
  if (b || p.in_features == 0)
    for_each(p.rows * p.out_features, workspace, "linear_gemm",
             [=] __device__(int64_t i) { y[i] = b ? b[i % p.out_features] : T{}; });
  if (p.in_features != 0)
    cublas_gemm(p.dtype, p.allow_tf32,
                {p.rows, p.out_features, p.in_features, x, p.in_features, 0, false, w, p.in_features, 0, true, y, p.out_features,
                 0, 1, b != nullptr},
                take<char>(workspace, cublas_workspace()));
}

bool gemm_supports(const LinearProblem& p, Reason& reason) {
  return device_supports(p, reason) && cublas_supports({p.rows, p.in_features, p.out_features}, reason);
}
int64_t gemm_workspace(const LinearProblem&) { return cublas_workspace(); }

// With the call's switches, where PyTorch's product has those of the process.
GradientNames gemm_gradients(const LinearProblem&) { return {"gemm", "gemm"}; }

AI3_ALGORITHM(linear, gemm, .supports = gemm_supports, .workspace = gemm_workspace, .gradients = gemm_gradients)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

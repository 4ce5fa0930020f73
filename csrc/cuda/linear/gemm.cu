// y = x w^T + b by cuBLAS.
#include "../../algos/linear/problem.h"
#include "../core/cublas.cuh"

namespace ai3::inline AI3_LEVEL {
namespace {

// Whether the bias is added to float32 sums, which are rounded once: cuBLAS's products of 16 bits may be rounded before.
bool adds_apart(const LinearProblem& p) { return p.has_bias && size_of(p.dtype) == 2 && p.in_features != 0; }

template <class T>
void linear_gemm(const LinearProblem& p, const T* x, const T* w, const T* b, T* y, Workspace& workspace) {
  if (b || p.in_features == 0)
    for_each(p.rows * p.out_features, workspace, "linear_gemm",
             [=] __device__(int64_t i) { y[i] = b ? b[i % p.out_features] : T{}; });
  if (p.in_features == 0) return;
  void* const scratch = take<char>(workspace, cublas_workspace());
  Gemm product = {
      p.rows, p.out_features, p.in_features, x, p.in_features, 0, false, w, p.in_features, 0, true, y, p.out_features, 0,
      1,      b != nullptr};
  if (!adds_apart(p)) return cublas_gemm(p.dtype, p.allow_tf32, product, scratch);
  float* const sums = take<float>(workspace, p.rows * p.out_features);
  product.c = sums, product.add = false;
  cublas_gemm(p.dtype, DType::f32, p.allow_tf32, product, scratch);
  for_each(p.rows * p.out_features, workspace, "linear_gemm",
           [=] __device__(int64_t i) { store_acc(y + i, static_cast<Acc<T>>(sums[i]) + load_acc(b + i % p.out_features)); });
}

bool gemm_supports(const LinearProblem& p, Reason& reason) {
  return device_supports(p, reason) && cublas_supports({p.rows, p.in_features, p.out_features}, reason);
}
int64_t gemm_workspace(const LinearProblem& p) {
  const int64_t sums = adds_apart(p) ? piece_bytes<float>(checked_mul(p.rows, p.out_features)) : 0;
  return checked_add(cublas_workspace(), sums);
}

// With the call's switches, where PyTorch's product has those of the process.
GradientNames gemm_gradients(const LinearProblem&) { return {"gemm", "gemm"}; }

AI3_ALGORITHM(linear, gemm, .supports = gemm_supports, .workspace = gemm_workspace, .gradients = gemm_gradients)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

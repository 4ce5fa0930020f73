// y = x w^T + b by cuBLAS.
#include "product.cuh"

namespace ai3::inline AI3_LEVEL {
namespace {

template <class T>
void linear_gemm(const LinearProblem& p, const T* x, const T* w, const T* b, T* y, Workspace& workspace) {
  const bool apart = adds_apart(p);
  if (p.in_features == 0 || (b && !apart)) fill_rows(p, b, y, workspace, "linear_gemm");
  if (p.in_features == 0) return;
  void* const scratch = take<char>(workspace, cublas_workspace());
  Gemm product = {
      p.rows, p.out_features, p.in_features, x, p.in_features, 0, false, w, p.in_features, 0, true, y, p.out_features, 0,
      1,      b != nullptr};
  if (!apart) return cublas_gemm(p.dtype, p.allow_tf32, product, scratch);
  float* const sums = take<float>(workspace, p.rows * p.out_features);
  product.c = sums, product.add = false;
  cublas_gemm(p.dtype, DType::f32, p.allow_tf32, product, scratch);
  add_bias(p, sums, b, y, workspace, "linear_gemm");
}

AI3_ALGORITHM(linear, gemm, .supports = product_supports, .workspace = product_workspace, .gradients = gradients_by_gemm)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

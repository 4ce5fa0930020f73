// y = x w^T + b by cublasLt, which adds the bias as it stores the product.
#include "product.cuh"

namespace ai3::inline AI3_LEVEL {
namespace {

template <class T>
void linear_cublaslt(const LinearProblem& p, const T* x, const T* w, const T* b, T* y, Workspace& workspace) {
  if (p.in_features == 0) return fill_rows(p, b, y, workspace, "linear_cublaslt");
  void* const scratch = take<char>(workspace, cublas_workspace());
  BiasedProduct product = {p.rows, p.out_features, p.in_features, x, w, b, y};
  if (!adds_apart(p)) return cublaslt_product(p.dtype, p.dtype, p.allow_tf32, product, scratch, workspace.stream);
  float* const sums = take<float>(workspace, p.rows * p.out_features);
  product.c = sums, product.bias = nullptr;
  cublaslt_product(p.dtype, DType::f32, p.allow_tf32, product, scratch, workspace.stream);
  add_bias(p, sums, b, y, workspace, "linear_cublaslt");
}

AI3_ALGORITHM(linear, cublaslt, .supports = product_supports, .workspace = product_workspace, .gradients = gradients_by_gemm)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

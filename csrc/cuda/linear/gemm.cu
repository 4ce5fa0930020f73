// y = x w^T + b by cuBLAS.
#include "../core/cublas.cuh"

namespace ai3::inline AI3_LEVEL {
namespace {

template <class T>
void linear_gemm(const LinearProblem& p, const T* x, const T* w, const T* b, T* y, Workspace& workspace) {
  if (p.in_features == 0)
    check_cuda(cudaMemsetAsync(y, 0, static_cast<size_t>(p.rows * p.out_features) * sizeof(T), stream_of(workspace)),
               "linear_gemm");
  else
    cublas_gemm(
        p.dtype, p.allow_tf32,
        {p.rows, p.out_features, p.in_features, x, p.in_features, 0, false, w, p.in_features, 0, true, y, p.out_features, 0, 1});
  if (!b) return;
  for_each(p.rows * p.out_features, workspace, "linear_gemm",
           [=] __device__(int64_t i) { store_acc(y + i, load_acc(y + i) + load_acc(b + i % p.out_features)); });
}

AI3_ALGORITHM(linear, gemm)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

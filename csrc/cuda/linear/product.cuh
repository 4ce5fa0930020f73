// What linear's algorithms by cuBLAS share.
#pragma once
#include "../../algos/linear/problem.h"
#include "../core/cublas.cuh"
#include "../core/device.cuh"

namespace ai3::inline AI3_LEVEL {

// Whether the bias is added to float32 sums, which are rounded once: cuBLAS's products of 16 bits may be rounded before.
inline bool adds_apart(const LinearProblem& p) { return p.has_bias && size_of(p.dtype) == 2 && p.in_features != 0; }
template <class T>
void add_bias(const LinearProblem& p, const float* sums, const T* b, T* y, const Workspace& workspace, const char* what) {
  for_each(p.rows * p.out_features, workspace, what,
           [=] __device__(int64_t i) { store_acc(y + i, static_cast<Acc<T>>(sums[i]) + load_acc(b + i % p.out_features)); });
}
// The bias in every row, or zeros.
template <class T>
void fill_rows(const LinearProblem& p, const T* b, T* y, const Workspace& workspace, const char* what) {
  for_each(p.rows * p.out_features, workspace, what, [=] __device__(int64_t i) { y[i] = b ? b[i % p.out_features] : T{}; });
}

inline bool product_supports(const LinearProblem& p, Reason& reason) {
  return device_supports(p, reason) && cublas_supports({p.rows, p.in_features, p.out_features}, reason);
}
inline int64_t product_workspace(const LinearProblem& p) {
  const int64_t sums = adds_apart(p) ? piece_bytes<float>(checked_mul(p.rows, p.out_features)) : 0;
  return checked_add(cublas_workspace(), sums);
}
// With the call's switches, where PyTorch's product has those of the process.
inline GradientNames gradients_by_gemm(const LinearProblem&) { return {"gemm", "gemm"}; }

}  // namespace ai3::inline AI3_LEVEL

// thin first version
#include "../core/algorithm.h"

namespace ai3::inline AI3_LEVEL {
namespace {

template <class T>
void linear_gemm(const LinearProblem& p, const T* x, const T* w, const T* b, T* y, Workspace&) {
  for (int64_t m = 0; m < p.rows; m++)
    for (int64_t n = 0; n < p.out_features; n++) {
      Acc<T> sum = b ? widen(b[n]) : 0;
      for (int64_t k = 0; k < p.in_features; k++) sum = fma1<Acc<T>>(widen(x[m * p.in_features + k]), widen(w[n * p.in_features + k]), sum);
      y[m * p.out_features + n] = narrowed<T>(sum);
    }
}

AI3_ALGORITHM(linear, gemm)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

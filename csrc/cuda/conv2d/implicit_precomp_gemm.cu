// cuDNN's implicit GEMM with offsets computed first (Chetlur et al. 2014): the matrix of patches is never stored, and where its
// elements lie in the input is looked up. The bias is what the product is added onto, so that half types round once.
#include "../../algos/conv2d/problem.h"
#include "../core/cudnn.cuh"

namespace ai3::inline AI3_LEVEL {
namespace {

constexpr auto kMethod = CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM;

bool precomp_supports(const Conv2dProblem& p, Reason& reason) { return cudnn_supports(p, kMethod, reason); }
int64_t precomp_workspace(const Conv2dProblem& p) { return cudnn_workspace(p, kMethod); }

template <class T>
void conv2d_implicit_precomp_gemm(const Conv2dProblem& p, const T* x, const T* w, const T* b, T* y, Workspace& workspace) {
  if (b) spread_bias(p, b, y, workspace, "conv2d_implicit_precomp_gemm");
  cudnn_convolution(p, kMethod, x, w, b != nullptr, y, workspace);
}

AI3_ALGORITHM(conv2d, implicit_precomp_gemm, .supports = precomp_supports, .workspace = precomp_workspace)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

// cuDNN's explicit GEMM: the matrix of patches is stored in the workspace, then multiplied.
#include "../core/cudnn.cuh"

namespace ai3::inline AI3_LEVEL {
namespace {

using By = Cudnn<CUDNN_CONVOLUTION_FWD_ALGO_GEMM>;

template <class T>
void conv2d_gemm(const Conv2dProblem& p, const Conv2dOperands& m, Workspace& workspace) {
  By::run<T>(p, m, workspace);
}

AI3_ALGORITHM(conv2d, gemm, .supports = By::supports, .workspace = By::workspace, .gradients = gradients_by_im2col)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

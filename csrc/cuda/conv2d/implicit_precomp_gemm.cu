// cuDNN's implicit GEMM with offsets computed first (Chetlur et al. 2014): the matrix of patches is never stored, and where its
// elements lie in the input is looked up. Its store adds the bias.
#include "../core/cudnn.cuh"

namespace ai3::inline AI3_LEVEL {
namespace {

using By = Cudnn<CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM>;

template <class T>
void conv2d_implicit_precomp_gemm(const Conv2dProblem& p, const Conv2dOperands& m, Workspace& workspace) {
  By::run<T>(p, m, workspace);
}

AI3_ALGORITHM(conv2d, implicit_precomp_gemm, .supports = By::supports, .workspace = By::workspace,
              .packed_bytes = By::packed_bytes, .pack = pack_krsc, .gradients = gradients_by_im2col)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

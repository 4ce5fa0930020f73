// cuDNN's implicit GEMM with offsets computed first (Chetlur et al. 2014): the matrix of patches is never stored, and where its
// elements lie in the input is looked up. Its store adds the bias.
#include "../core/cudnn.cuh"

namespace ai3::inline AI3_LEVEL {
namespace {

using By = Cudnn<CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM>;

AI3_REGISTER_(conv2d, implicit_precomp_gemm, By::run, .supports = By::supports, .workspace = By::workspace,
              .packed_bytes = cudnn_packed_bytes, .pack = cudnn_pack, .gradients = gradients_by_im2col)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

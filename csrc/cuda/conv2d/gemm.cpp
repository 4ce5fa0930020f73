// cuDNN's explicit GEMM: the matrix of patches is stored in the workspace, then multiplied.
#include "../core/cudnn.cuh"

namespace ai3::inline AI3_LEVEL {
namespace {

using By = Cudnn<CUDNN_CONVOLUTION_FWD_ALGO_GEMM>;

AI3_REGISTER_(conv2d, gemm, By::run, .supports = By::supports, .workspace = By::workspace, .gradients = gradients_by_im2col)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

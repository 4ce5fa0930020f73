// cuDNN's Winograd convolution (Lavin & Gray 2015) with transforms and products in kernels of their own, between which the
// transformed tiles lie in the workspace. The bound is that of the CPU's F(4x4, 3x3).
#include "../core/cudnn.cuh"

namespace ai3::inline AI3_LEVEL {
namespace {

using By = Cudnn<CUDNN_CONVOLUTION_FWD_ALGO_WINOGRAD_NONFUSED>;

AI3_REGISTER_(conv2d, winograd_nonfused, By::run, .accuracy = Accuracy::bounded, .error_bound = 2e-5, .supports = By::supports,
              .workspace = By::workspace, .gradients = gradients_by_im2col)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

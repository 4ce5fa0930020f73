// cuDNN's Winograd convolution in one kernel (Lavin & Gray 2015), on GPUs for which it has one. The bound is that of the CPU's.
#include "../core/cudnn.cuh"

namespace ai3::inline AI3_LEVEL {
namespace {

using By = Cudnn<CUDNN_CONVOLUTION_FWD_ALGO_WINOGRAD>;

AI3_REGISTER_(conv2d, winograd, By::run, .accuracy = Accuracy::bounded, .error_bound = 2e-5, .supports = By::supports,
              .workspace = By::workspace, .gradients = gradients_by_im2col)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

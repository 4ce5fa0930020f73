// cuDNN's convolution by Fourier transforms of tiles, which take less memory than those of whole images. In NCHW only.
#include "../core/cudnn.cuh"

namespace ai3::inline AI3_LEVEL {
namespace {

using By = Cudnn<CUDNN_CONVOLUTION_FWD_ALGO_FFT_TILING>;

AI3_REGISTER_(conv2d, fft_tiling, By::run, .accuracy = Accuracy::bounded, .error_bound = 5e-6, .layout = Layout::nchw,
              .supports = By::supports, .workspace = By::workspace, .gradients = gradients_by_im2col)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

// cuDNN's convolution by Fourier transforms of whole images. cuDNN reads images in NCHW only; its bound is that of the CPU's.
#include "../core/cudnn.cuh"

namespace ai3::inline AI3_LEVEL {
namespace {

using By = Cudnn<CUDNN_CONVOLUTION_FWD_ALGO_FFT>;

AI3_REGISTER_(conv2d, fft, By::run, .accuracy = Accuracy::bounded, .error_bound = 5e-6, .layout = Layout::nchw,
              .supports = By::supports, .workspace = By::workspace, .gradients = gradients_by_im2col)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

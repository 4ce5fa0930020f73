// cuDNN's convolution by Fourier transforms of whole images. cuDNN reads images in NCHW only; its bound is that of the CPU's.
#include "../core/cudnn.cuh"

namespace ai3::inline AI3_LEVEL {
namespace {

using By = Cudnn<CUDNN_CONVOLUTION_FWD_ALGO_FFT>;

template <class T>
void conv2d_fft(const Conv2dProblem& p, const Conv2dOperands& m, Workspace& workspace) {
  By::run<T>(p, m, workspace);
}

AI3_ALGORITHM(conv2d, fft, .accuracy = Accuracy::bounded, .error_bound = 5e-6, .layout = Layout::nchw, .supports = By::supports,
              .workspace = By::workspace, .gradients = gradients_by_im2col)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

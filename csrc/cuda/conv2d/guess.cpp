// cuDNN's heuristic, asked by its old interface, which names methods: the one that it expects to be fastest runs, as the
// algorithm of that name.
#include "../core/cudnn.cuh"
#include "../core/host.h"

namespace ai3::inline AI3_LEVEL {
namespace {

const char* algorithm_of(cudnnConvolutionFwdAlgo_t method) {
  switch (method) {
    case CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_GEMM: return "implicit_gemm";
    case CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM: return "implicit_precomp_gemm";
    case CUDNN_CONVOLUTION_FWD_ALGO_GEMM: return "gemm";
    case CUDNN_CONVOLUTION_FWD_ALGO_FFT: return "fft";
    case CUDNN_CONVOLUTION_FWD_ALGO_FFT_TILING: return "fft_tiling";
    case CUDNN_CONVOLUTION_FWD_ALGO_WINOGRAD: return "winograd";
    case CUDNN_CONVOLUTION_FWD_ALGO_WINOGRAD_NONFUSED: return "winograd_nonfused";
    default: return "";  // its `direct`, which it has never had
  }
}

Choice choose(const Conv2dProblem& p, const Candidates<Conv2dProblem>& usable) {
  if (current_capability() == 0 || p.batch == 0 || !sizes_known(p))
    return {"implicit_gemm", "cuDNN cannot be asked without a GPU and all sizes"};
  for (const cudnnConvolutionFwdAlgo_t method : cudnn_ranked(p))
    if (usable(p, algorithm_of(method))) return {algorithm_of(method), "the first of cuDNN's heuristic"};
  return {nullptr};
}

AI3_ALGORITHM_WITHOUT_KERNEL(conv2d, guess, .accuracy = Accuracy::bounded, .error_bound = 4e-5, .choose = choose)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

// Convolutions by cuDNN, the method named: handles, and plans that are kept. One .cu of conv2d for each method calls this.
#pragma once
#include <cudnn.h>

#include "../../algos/conv2d/problem.h"
#include "../conv2d/gradients.cuh"
#include "../conv2d/krsc.cuh"
#include "device.cuh"

namespace ai3::inline AI3_LEVEL {

// False, with cuDNN's own words, for what it refuses. True where it cannot be asked: some sizes are unknown, or there is no GPU.
// Throws std::runtime_error, with its words, where the answer says that it was asked wrongly or is not in order.
bool cudnn_supports(const Conv2dProblem& p, cudnnConvolutionFwdAlgo_t method, Reason& reason);
// Bytes, a multiple of 256. Throws std::runtime_error where cuDNN cannot be asked.
int64_t cudnn_workspace(const Conv2dProblem& p, cudnnConvolutionFwdAlgo_t method);
// Whether w is to be KRSC; else it is KCRS.
bool cudnn_reads_krsc(const Conv2dProblem& p, cudnnConvolutionFwdAlgo_t method);
// Writes every output's bias.
using BiasSpread = void (*)(const Conv2dProblem& p, const void* b, void* y, const Workspace& workspace);
// y = x * w + b, b null for none, on the workspace's stream. Where cuDNN does not add the bias itself, the products are added
// onto what `spread` writes, so that half types round once. Throws std::runtime_error.
void cudnn_convolution(const Conv2dProblem& p, cudnnConvolutionFwdAlgo_t method, const void* x, const void* w, const void* b,
                       BiasSpread spread, void* y, Workspace& workspace);

// The functions of the method's record.
template <cudnnConvolutionFwdAlgo_t method>
struct Cudnn {
  static bool supports(const Conv2dProblem& p, Reason& reason) { return cudnn_supports(p, method, reason); }
  static int64_t workspace(const Conv2dProblem& p) { return cudnn_workspace(p, method); }
  static int64_t packed_bytes(const Conv2dProblem& p) { return cudnn_reads_krsc(p, method) ? krsc_bytes(p) : 0; }
  template <class T>
  static void run(const Conv2dProblem& p, const Conv2dOperands& m, Workspace& workspace) {
    const BiasSpread spread = [](const Conv2dProblem& q, const void* b, void* y, const Workspace& memory) {
      spread_bias(q, static_cast<const T*>(b), static_cast<T*>(y), memory, "cuDNN's bias");
    };
    cudnn_convolution(p, method, m.input.data, m.weight.data, m.bias.data, spread, m.output.data, workspace);
  }
};

}  // namespace ai3::inline AI3_LEVEL

// Convolutions by cuDNN, the method named: handles, and plans that are kept. One .cu of conv2d for each method calls this.
#pragma once
#include <cudnn.h>

#include "../../algos/conv2d/problem.h"
#include "device.cuh"

namespace ai3::inline AI3_LEVEL {

// False, with cuDNN's own words, for what it refuses. True where it cannot be asked: some sizes are unknown, or there is no GPU.
bool cudnn_supports(const Conv2dProblem& p, cudnnConvolutionFwdAlgo_t method, Reason& reason);
// Bytes, a multiple of 64. Throws std::runtime_error where cuDNN cannot be asked.
int64_t cudnn_workspace(const Conv2dProblem& p, cudnnConvolutionFwdAlgo_t method);
// y = x * w, onto what y holds where `add`, on the workspace's stream. Throws std::runtime_error.
void cudnn_convolution(const Conv2dProblem& p, cudnnConvolutionFwdAlgo_t method, const void* x, const void* w, bool add, void* y,
                       Workspace& workspace);

}  // namespace ai3::inline AI3_LEVEL

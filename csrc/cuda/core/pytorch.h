// What the CUDA kernels get from PyTorch; csrc/cuda/*.cpp ask it, and everything else here is free of PyTorch.
#pragma once
#include "../../algos/attention/problem.h"

namespace ai3 {

// PyTorch's cublasHandle_t of this thread and the current device, set to its current stream. Throws std::runtime_error.
void* current_blas_handle();

// PyTorch's flash attention of 16-bit types, on the current device and stream: windows, causal or lower right, and nothing that
// is added to scores. Its results are in memory of PyTorch's own, from which they are copied. Throw std::runtime_error.
void pytorch_flash_attention(const AttentionProblem& p, const AttentionOperands& m);
void pytorch_flash_attention_backward(const AttentionProblem& p, const AttentionGradients& m);

}  // namespace ai3

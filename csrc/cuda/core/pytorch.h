// What the CUDA kernels get from PyTorch; library.cpp asks it, and everything else here is free of PyTorch.
#pragma once

namespace ai3 {

// PyTorch's cublasHandle_t of this thread and the current device, set to its current stream. Throws std::runtime_error.
void* current_blas_handle();

}  // namespace ai3

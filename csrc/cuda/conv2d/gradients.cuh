// Who computes gradients on CUDA. PyTorch's operator for them reads its own process-wide switches: a call with allow_tf32 or
// deterministic of its own would be rounded, or summed in an order, that it did not ask for.
#pragma once
#include "../../algos/conv2d/problem.h"

namespace ai3::inline AI3_LEVEL {

// im2col: it supports every case, and cuBLAS gets the call's switches.
inline GradientNames gradients_by_im2col(const Conv2dProblem&) { return {"im2col", "im2col"}; }

}  // namespace ai3::inline AI3_LEVEL

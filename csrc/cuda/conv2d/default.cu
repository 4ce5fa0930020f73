#include "../../algos/core/algorithm.h"

namespace ai3::inline AI3_LEVEL {
namespace {

// cuBLAS's GEMM is the fastest of this device's own kernels at every shape.
AI3_ALGORITHM_WITHOUT_KERNEL(
    conv2d, default, .choose = [](const problem_of::conv2d&, auto) { return "im2col"; })

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

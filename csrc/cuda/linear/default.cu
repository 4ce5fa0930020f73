#include "../../algos/linear/problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

// cuBLAS's GEMM is the fastest of this device's own kernels at every shape.
AI3_ALGORITHM_WITHOUT_KERNEL(
    linear, default, .choose = [](const problem_of::linear&, auto) -> Choice { return {"gemm"}; })

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

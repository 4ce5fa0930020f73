#include "../../algos/conv2d/problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

// cuBLAS multiplies there, and it supports every case. Few channels in a group fill its GEMM badly: depthwise layers, one launch
// for each group, are what this rule is worst at.
AI3_ALGORITHM_WITHOUT_KERNEL(
    conv2d, default, .choose = [](const problem_of::conv2d&, auto) -> Choice { return {"im2col"}; })

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

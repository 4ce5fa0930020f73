#include "../../algos/conv2d/problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

// It supports every case. No GPU has measured what is fastest: swapped layers stay PyTorch's until then, and only a direct call
// of the operator comes here.
AI3_ALGORITHM_WITHOUT_KERNEL(
    conv2d, default, .choose = [](const problem_of::conv2d&, auto) -> Choice { return {"im2col"}; })

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

#include "../../algos/linear/problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

// It supports every case. No GPU has measured what is fastest: swapped layers stay PyTorch's until then.
AI3_ALGORITHM_WITHOUT_KERNEL(
    linear, default, .choose = [](const problem_of::linear&, auto) -> Choice { return {"gemm"}; })

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

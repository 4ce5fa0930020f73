#include "../../algos/linear/problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

// It supports every case. PyTorch's product, which adds the bias itself, is faster (docs/benchmarks/cuda.md): swapped layers stay
// so.
AI3_ALGORITHM_WITHOUT_KERNEL(
    linear, default, .choose = [](const problem_of::linear&, auto) -> Choice { return {"gemm"}; })

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

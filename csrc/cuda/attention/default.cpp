#include "../../algos/attention/problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

// It supports every case. No GPU has measured it beside PyTorch's choice: swapped layers leave attention to that.
AI3_ALGORITHM_WITHOUT_KERNEL(
    attention, default, .accuracy = Accuracy::bounded, .error_bound = 4e-6,
    .choose = [](const problem_of::attention&, auto) -> Choice { return {"math"}; })

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

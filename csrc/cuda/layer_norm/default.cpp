#include "../../algos/layer_norm/problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

AI3_ALGORITHM_WITHOUT_KERNEL(
    layer_norm, default, .accuracy = Accuracy::bounded, .error_bound = 4e-6,
    .choose = [](const problem_of::layer_norm&, auto) -> Choice { return {"direct"}; })

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

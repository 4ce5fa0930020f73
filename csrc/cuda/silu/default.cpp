#include "../../algos/silu/problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

AI3_ALGORITHM_WITHOUT_KERNEL(
    silu, default, .accuracy = Accuracy::bounded, .error_bound = 1e-6,
    .choose = [](const problem_of::silu&, auto) -> Choice { return {"direct"}; })

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

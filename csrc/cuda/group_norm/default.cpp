#include "../../algos/group_norm/problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

AI3_ALGORITHM_WITHOUT_KERNEL(
    group_norm, default, .accuracy = Accuracy::bounded, .error_bound = 4e-6,
    .choose = [](const problem_of::group_norm&, auto) -> Choice { return {"direct"}; })

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

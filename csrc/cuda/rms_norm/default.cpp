#include "../../algos/rms_norm/problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

AI3_ALGORITHM_WITHOUT_KERNEL(
    rms_norm, default, .accuracy = Accuracy::bounded, .error_bound = 4e-6,
    .choose = [](const problem_of::rms_norm&, auto) -> Choice { return {"direct"}; })

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

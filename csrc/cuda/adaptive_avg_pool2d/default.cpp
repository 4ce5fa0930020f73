#include "../../algos/adaptive_avg_pool2d/problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

AI3_ALGORITHM_WITHOUT_KERNEL(
    adaptive_avg_pool2d, default, .choose = [](const problem_of::adaptive_avg_pool2d&, auto) -> Choice { return {"direct"}; })

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

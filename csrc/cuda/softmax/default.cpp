#include "../../algos/softmax/problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

AI3_ALGORITHM_WITHOUT_KERNEL(
    softmax, default, .accuracy = Accuracy::bounded, .error_bound = 4e-6,
    .choose = [](const problem_of::softmax&, auto) -> Choice { return {"direct"}; })

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

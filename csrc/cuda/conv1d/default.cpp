#include "../../algos/conv1d/problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

AI3_ALGORITHM_WITHOUT_KERNEL(
    conv1d, default, .choose = [](const problem_of::conv1d&, auto) -> Choice { return {"im2col"}; })

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

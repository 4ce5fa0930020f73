#include "../../algos/flatten/problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

AI3_ALGORITHM_WITHOUT_KERNEL(
    flatten, default, .choose = [](const problem_of::flatten&, auto) -> Choice { return {"direct"}; })

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

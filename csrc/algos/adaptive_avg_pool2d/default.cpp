// The one own algorithm.
#include "problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

Choice choose(const Pool2dProblem&, const Candidates<Pool2dProblem>&) { return {"direct"}; }

AI3_ALGORITHM_WITHOUT_KERNEL(adaptive_avg_pool2d, default, .choose = choose)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

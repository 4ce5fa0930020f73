// The one own algorithm.
#include "problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

Choice choose(const RmsNormProblem&, const Candidates<RmsNormProblem>&) { return {"direct"}; }

AI3_ALGORITHM_WITHOUT_KERNEL(rms_norm, default, .accuracy = Accuracy::bounded, .error_bound = 4e-6, .choose = choose)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

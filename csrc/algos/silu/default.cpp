// The one own algorithm.
#include "problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

Choice choose(const ElementwiseProblem&, const Candidates<ElementwiseProblem>&) { return {"direct"}; }

AI3_ALGORITHM_WITHOUT_KERNEL(silu, default, .accuracy = Accuracy::bounded, .error_bound = 1e-6, .choose = choose)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

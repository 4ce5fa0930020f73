// Tiles, always: the definition takes more memory and more time.
#include "problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

Choice choose(const AttentionProblem& p, const Candidates<AttentionProblem>& usable) {
  return {usable(p, "flash") ? "flash" : "math"};
}

AI3_ALGORITHM_WITHOUT_KERNEL(attention, default, .accuracy = Accuracy::bounded, .error_bound = 4e-6, .choose = choose)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

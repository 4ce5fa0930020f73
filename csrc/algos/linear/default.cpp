// The project's choice: its own packed GEMM, which supports everything.
#include "problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

Choice choose(const LinearProblem&, const Candidates<LinearProblem>&) { return {"gemm"}; }

AI3_ALGORITHM_WITHOUT_KERNEL(linear, default, .choose = choose)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

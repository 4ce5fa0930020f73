// The project's choice by shape, without measuring.
#include "problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

Choice choose(const Conv2dProblem&, const Candidates<Conv2dProblem>&) { return {"direct"}; }

AI3_ALGORITHM_WITHOUT_KERNEL(conv1d, default, .choose = choose)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

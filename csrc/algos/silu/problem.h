// The problem of silu.
#pragma once
#include "../core/elementwise_problem.h"

namespace ai3::problem_of {
using silu = ElementwiseProblem;
}  // namespace ai3::problem_of

// The problem of flatten.
#pragma once
#include "../core/elementwise_problem.h"

namespace ai3::problem_of {
using flatten = ElementwiseProblem;
}  // namespace ai3::problem_of

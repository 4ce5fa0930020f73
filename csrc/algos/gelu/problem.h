// The problem of gelu.
#pragma once
#include "../core/elementwise_problem.h"

namespace ai3::problem_of {
using gelu = ElementwiseProblem;
}  // namespace ai3::problem_of

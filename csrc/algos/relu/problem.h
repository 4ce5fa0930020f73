// The problem of relu.
#pragma once
#include "../core/elementwise_problem.h"

namespace ai3::problem_of {
using relu = ElementwiseProblem;
}  // namespace ai3::problem_of

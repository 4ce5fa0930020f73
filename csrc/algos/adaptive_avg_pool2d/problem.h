// The problem of adaptive_avg_pool2d.
#pragma once
#include "../core/pool_problem.h"

namespace ai3::problem_of {
using adaptive_avg_pool2d = Pool2dProblem;
}  // namespace ai3::problem_of

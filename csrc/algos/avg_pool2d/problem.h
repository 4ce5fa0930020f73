// The problem of avg_pool2d.
#pragma once
#include "../core/pool_problem.h"

namespace ai3::problem_of {
using avg_pool2d = Pool2dProblem;
}  // namespace ai3::problem_of

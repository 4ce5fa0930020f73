// The arguments of one linear call, for the glue and for the algorithms that call PyTorch's own operators.
#pragma once
#include "../algos/linear/problem.h"
#include "prepare/weighted.h"

namespace ai3::ops {

struct LinearCall : WeightedCall {};

// The problem that a query describes.
LinearProblem linear_from(const Query& q);

}  // namespace ai3::ops

// The arguments of one linear call, for the glue and for the algorithms that call PyTorch's own operators.
#pragma once
#include "weighted.h"

namespace ai3::ops {

struct LinearCall : WeightedCall {};

// The problem that a query describes.
LinearProblem linear_from(const Query& q);
// What a pack may depend on.
std::array<int64_t, 3> pack_description(const LinearProblem& p);

}  // namespace ai3::ops

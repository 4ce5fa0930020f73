// The arguments of one linear call, for the glue and for the algorithms that call PyTorch's own operators.
#pragma once
#include "weighted.h"

namespace ai3::ops {

struct LinearCall : WeightedCall {};

}  // namespace ai3::ops

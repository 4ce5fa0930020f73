// What conv1d computes: conv2d of images of height 1, kernels of height 1 and stride, dilation 1 and padding 0 along it.
#pragma once
#include "../conv2d/problem.h"

namespace ai3::problem_of {
using conv1d = Conv2dProblem;
}  // namespace ai3::problem_of

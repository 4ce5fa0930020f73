// The project's choice by shape, without measuring: measured in docs/algorithms/conv1d/default.md.
#include "problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

Choice choose(const Conv2dProblem& p, const Candidates<Conv2dProblem>& usable) {
  if (p.groups > 1 && p.groups == p.in_channels && usable(p, "im2col")) return {"im2col", "depthwise"};
  return {usable(p, "direct") ? "direct" : "im2col"};
}

AI3_ALGORITHM_WITHOUT_KERNEL(conv1d, default, .choose = choose)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

// The project's choice by shape, without measuring: measured in docs/algorithms/conv1d/default.md.
#include "problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

constexpr int64_t kFewChannels = 8;  // of each group: `direct` goes over them one by one, in few steps for each output

Choice choose(const Conv2dProblem& p, const Candidates<Conv2dProblem>& usable) {
  if (p.groups > 1 && p.groups == p.in_channels && usable(p, "im2col")) return {"im2col", "depthwise"};
  if (p.in_channels > 0 && p.groups > 0 && p.in_channels / p.groups < kFewChannels && usable(p, "im2col"))
    return {"im2col", "few channels"};
  return {usable(p, "direct") ? "direct" : "im2col"};
}

AI3_ALGORITHM_WITHOUT_KERNEL(conv1d, default, .choose = choose)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

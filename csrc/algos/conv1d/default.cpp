// The project's choice by shape, without measuring: measured in docs/algorithms/conv1d/default.md.
#include "../conv2d/sequence.h"
#include "problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

constexpr int64_t kFewChannels = 8;  // of each group: `direct` goes over them one by one, in few steps for each output
constexpr int64_t kMultiplier = 2;   // of depthwise filters: each is a pass of its own over the sequence

// Whichever has the least work, one that transforms only where it saves some.
Choice choose(const Conv2dProblem& p, const Candidates<Conv2dProblem>& usable) {
  const bool depthwise = p.groups > 1 && p.groups == p.in_channels && p.out_channels <= kMultiplier * p.groups;
  if (depthwise && usable(p, "depthwise")) return {"depthwise", "one channel in each group"};
  Choice choice{usable(p, "direct") ? "direct" : "im2col"};
  if (p.in_channels > 0 && p.groups > 0 && p.in_channels / p.groups < kFewChannels && usable(p, "im2col"))
    choice = {"im2col", "few channels"};
  if (!sizes_known(p) || p.batch < 1) return choice;
  const Choice transform = least_transform(p, usable, choice.algorithm, "winograd");
  return transform.algorithm ? transform : choice;
}

AI3_ALGORITHM_WITHOUT_KERNEL(conv1d, default, .accuracy = Accuracy::bounded, .error_bound = 2e-5, .choose = choose)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

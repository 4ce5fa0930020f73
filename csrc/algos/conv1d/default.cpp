// The project's choice by shape, without measuring: measured in docs/algorithms/conv1d/default.md.
#include "../core/work.h"
#include "problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

constexpr int64_t kFewChannels = 8;  // of each group: `direct` goes over them one by one, in few steps for each output
constexpr int64_t kManyTaps = 7;     // from which on spectra are no more than 8 times the weight, and kept

// Whichever has the least work, one that transforms only where it saves some.
Choice choose(const Conv2dProblem& p, const Candidates<Conv2dProblem>& usable) {
  if (p.groups > 1 && p.groups == p.in_channels && usable(p, "depthwise")) return {"depthwise", "one channel in each group"};
  Choice choice{usable(p, "direct") ? "direct" : "im2col"};
  if (p.in_channels > 0 && p.groups > 0 && p.in_channels / p.groups < kFewChannels && usable(p, "im2col"))
    choice = {"im2col", "few channels"};
  if (!sizes_known(p) || p.batch < 1) return choice;
  auto is = [](const char* a, const char* b) { return __builtin_strcmp(a, b) == 0; };
  const char* const direct = choice.algorithm;
  double least = 0;
  usable.each(p, [&](const char* name, const Traits<Conv2dProblem>& traits) {
    if (is(name, direct) && traits.cost) least = work(traits.cost(p));
  });
  usable.each(p, [&](const char* name, const Traits<Conv2dProblem>& traits) {
    const bool transforms = is(name, "winograd") || (is(name, "fft") && p.kernel_width >= kManyTaps);
    if (!transforms || !traits.cost) return;
    const double own = work(traits.cost(p));
    if (own < least) least = own, choice = {name, "less work than each product once"};
  });
  return choice;
}

AI3_ALGORITHM_WITHOUT_KERNEL(conv1d, default, .accuracy = Accuracy::bounded, .error_bound = 2e-5, .choose = choose)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

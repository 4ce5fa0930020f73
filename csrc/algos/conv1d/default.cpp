// The project's choice by shape, without measuring: measured in docs/algorithms/conv1d/default.md.
#include "../core/work.h"
#include "problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

constexpr int64_t kFewChannels = 8;  // of each group: `direct` goes over them one by one, in few steps for each output
constexpr int64_t kManyTaps = 7;     // from which on spectra are no more than 8 times the weight, and kept
constexpr int64_t kFilled = 16;      // channels of a group that fill the vectors of a transformed tile
constexpr int64_t kPanelFilled = Vec<float>::width > 8 ? 32 : 16;  // filters of a group that fill the panels of its weights
constexpr int64_t kLongTaps = 96;  // from which on a Fourier transform saves enough for one channel
constexpr int64_t kLongFilters = 32;
constexpr int64_t kMultiplier = 2;  // of depthwise filters: each is a pass of its own over the sequence

// Whether a transform, Fourier's or Winograd's, may have less work than each product once; the model does not know of vectors
// that are mostly empty.
bool may_transform(const Conv2dProblem& p, bool fourier) {
  const int64_t channels = p.in_channels / p.groups, filters = p.out_channels / p.groups, taps = p.kernel_width;
  if (channels < kFilled || filters < kPanelFilled)
    return fourier && taps >= kLongTaps && p.stride_w == 1 && filters >= kLongFilters;
  return !fourier || taps >= kManyTaps;
}

// Whichever has the least work, one that transforms only where it saves some.
Choice choose(const Conv2dProblem& p, const Candidates<Conv2dProblem>& usable) {
  const bool depthwise = p.groups > 1 && p.groups == p.in_channels && p.out_channels <= kMultiplier * p.groups;
  if (depthwise && usable(p, "depthwise")) return {"depthwise", "one channel in each group"};
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
    const bool fourier = is(name, "fft");
    if ((!fourier && !is(name, "winograd")) || !traits.cost || !may_transform(p, fourier)) return;
    const double own = work(traits.cost(p));
    if (own < least) least = own, choice = {name, "less work than each product once"};
  });
  return choice;
}

AI3_ALGORITHM_WITHOUT_KERNEL(conv1d, default, .accuracy = Accuracy::bounded, .error_bound = 2e-5, .choose = choose)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

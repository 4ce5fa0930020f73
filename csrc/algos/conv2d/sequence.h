// What conv1d's rule and conv2d's, for images of one row, have in common: when a transform has less work than products.
#pragma once
#include "../core/work.h"
#include "problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

constexpr int64_t kManyTaps = 7;  // from which on spectra are no more than 8 times the weight, and kept
constexpr int64_t kFilled = 16;   // channels of a group that fill the vectors of a transformed tile
constexpr int64_t kPanelFilled = Vec<float>::width > 8 ? 32 : 16;  // filters of a group that fill the panels of its weights
constexpr int64_t kLongTaps = 96;  // from which on a Fourier transform saves enough for one channel
constexpr int64_t kLongFilters = 32;

// Whether an image and the kernels that go over it have one row.
AI3_INLINE bool is_sequence(const Conv2dProblem& p) { return p.in_height == 1 && p.kernel_height == 1 && p.pad_h == 0; }

// Whether a transform, Fourier's or Winograd's, may have less work than each product once; the model does not know of vectors
// that are mostly empty.
AI3_INLINE bool may_transform(const Conv2dProblem& p, bool fourier) {
  const int64_t channels = p.in_channels / p.groups, filters = p.out_channels / p.groups, taps = p.kernel_width;
  if (channels < kFilled || filters < kPanelFilled)
    return fourier && taps >= kLongTaps && p.stride_w == 1 && filters >= kLongFilters;
  return !fourier || taps >= kManyTaps;
}

// The transform with less work than `direct` has; nothing where there is none. `direct` and `winograd` are the operation's names
// of algorithms. Sizes are known, and no dimension is empty.
AI3_INLINE Choice least_transform(const Conv2dProblem& p, const Candidates<Conv2dProblem>& usable, const char* direct,
                                  const char* winograd) {
  auto is = [](const char* a, const char* b) { return __builtin_strcmp(a, b) == 0; };
  Choice choice{};
  double least = 0;
  usable.each(p, [&](const char* name, const Traits<Conv2dProblem>& traits) {
    if (is(name, direct) && traits.cost) least = work(traits.cost(p));
  });
  usable.each(p, [&](const char* name, const Traits<Conv2dProblem>& traits) {
    const bool fourier = is(name, "fft");
    if ((!fourier && !is(name, winograd)) || !traits.cost || !may_transform(p, fourier)) return;
    const double own = work(traits.cost(p));
    if (own < least) least = own, choice = {name, "less work than each product once"};
  });
  return choice;
}

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

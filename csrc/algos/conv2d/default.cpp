// The project's choice by shape, without measuring: the first row that fits and whose algorithm supports the case. Nothing
// approximate, and `winograd` never takes F(6x6, 3x3).
#include "../core/work.h"
#include "patches.h"
#include "problem.h"
#include "sequence.h"
#include "winograd.h"

namespace ai3::inline AI3_LEVEL {
namespace {

// Channels and filters, of each group, that Winograd needs (docs/algorithms/conv2d/default.md).
constexpr int64_t kLeastChannels = 16;
// Below this, transforming costs Winograd more than the products that it saves: measured (docs/algorithms/conv2d/default.md).
constexpr double kLeastFlops = 3e6;

// Of the direct method; many where a size is not known yet.
double flops(const Conv2dProblem& p) {
  if (!is_concrete(p)) return kLeastFlops;
  const ConvShape s(p);
  return 2 * static_cast<double>(s.rows) * static_cast<double>(s.depth) * static_cast<double>(p.out_channels);
}

bool enough_channels(const Conv2dProblem& p) {
  if (p.in_channels < 0 || p.out_channels < 0 || p.groups < 0) return false;
  return p.in_channels / p.groups >= kLeastChannels && p.out_channels / p.groups >= kLeastChannels;
}
// In 16 bits the vendor multiplies pairs where the processor can, at twice the rate of float32; bfloat16 in matrix tiles at 16
// times. Of our own kernels those for 1x1 and depthwise layers do so, too; Winograd, in float32, must save more than half of the
// products, and never saves enough to beat tiles (docs/algorithms/conv2d/default.md).
bool vendor_multiplies_pairs(const Conv2dProblem& p) {
  if (size_of(p.dtype) != 2 || is_pointwise(p)) return false;
  if (p.dtype == DType::bf16 && processor_has_matrix_tiles()) return true;
  Reason ignored;
  if (!is_concrete(p) || !enough_channels(p) || !winograd_supports(p, ignored)) return true;
  const double f2 = work(TransformDomainTraits<Winograd<2>>::cost(p)), f4 = work(TransformDomainTraits<Winograd<4>>::cost(p));
  return (f2 < f4 ? f2 : f4) > flops(p) / 2;
}

// One channel that few filters read: their lanes would be empty in `direct`, whose lanes are filters.
constexpr int64_t kFewFilters = 4;
bool is_one_channel_of_few_filters(const Conv2dProblem& p) {
  return p.groups == 1 && p.in_channels == 1 && p.out_channels > 0 && p.out_channels <= kFewFilters;
}
// 1x1 with a stride, whose weights are larger than the caches: half of what `direct` reads of the input are pixels that the
// stride leaves out. With 64-byte vectors that costs less than gathering the others.
constexpr int64_t kLargeWeight = 1 << 20;
bool is_strided_pointwise_of_large_weights(const Conv2dProblem& p) {
  return AI3_VECTOR_BYTES < 64 && p.kernel_height == 1 && p.kernel_width == 1 && (p.stride_h > 1 || p.stride_w > 1) &&
         p.groups == 1 && p.in_channels > 0 && p.out_channels > 0 && checked_mul(p.in_channels, p.out_channels) >= kLargeWeight;
}

bool in_channels_alone(const Conv2dProblem& p) { return p.groups > 1 && p.groups == p.in_channels; }
// Images of one row, whose transforms `choose_transform` rules. In 16 bits they are as images of more rows.
bool has_transforms_of_sequences(const Conv2dProblem& p) {
  return is_sequence(p) && sizes_known(p) && is_concrete(p) && size_of(p.dtype) > 2 && !in_channels_alone(p);
}
bool saves_products(const Conv2dProblem& p) {
  return !has_transforms_of_sequences(p) && enough_channels(p) && flops(p) >= kLeastFlops;
}

struct Row {
  Choice choice;
  bool (*fits)(const Conv2dProblem&);
};
constexpr Row rows[] = {
    {{"depthwise", "one input channel for each filter"}, in_channels_alone},
    {{"depthwise", "one channel, and few filters"}, is_one_channel_of_few_filters},
    {{"onednn", "multiplies 16-bit pairs, and winograd saves less"}, vendor_multiplies_pairs},
    // The transforms are amortized over channels (Lavin & Gray, "Fast Algorithms for Convolutional Neural Networks", 2015).
    {{"winograd", "saves more products than its transforms cost"}, saves_products},
    {{"implicit_precomp_gemm", "1x1 with a stride and large weights"}, is_strided_pointwise_of_large_weights},
    // Blocked over registers and cache, no workspace; 1x1 kernels are a GEMM in it.
    {{"direct"}, [](const Conv2dProblem&) { return true; }},
};

const char* why_not_winograd(Conv2dProblem p, const Candidates<Conv2dProblem>& usable) {
  if (!usable(p, "winograd")) {
    p.exclude = nullptr;
    return usable(p, "winograd") ? "winograd is excluded" : "winograd cannot do it";
  }
  return enough_channels(p) ? "too small for winograd's transforms" : "too few channels for winograd";
}

// Of images of one row, which `direct` reads with their channels innermost: up to 7 taps a transform needs more of them to be
// faster, and F(4, 7) is faster than a Fourier transform (docs/decisions/sequences.md).
constexpr int64_t kLeastOfASequence = 32;
Choice choose_transform(const Conv2dProblem& p, const Candidates<Conv2dProblem>& usable) {
  constexpr const char* winograd = "winograd_general";
  const Choice least = least_transform(p, usable, "direct", winograd);
  if (!least.algorithm || p.kernel_width > kManyTaps) return least;
  if (p.in_channels / p.groups < kLeastOfASequence) return {};
  return usable(p, winograd) ? Choice{winograd, least.why} : least;
}

Choice choose(const Conv2dProblem& p, const Candidates<Conv2dProblem>& usable) {
  const bool sequence = has_transforms_of_sequences(p);
  if (sequence) {
    const Choice transform = choose_transform(p, usable);
    if (transform.algorithm) return transform;
  }
  for (const Row& row : rows)
    if (row.fits(p) && usable(p, row.choice.algorithm)) {
      if (*row.choice.why) return row.choice;
      return {row.choice.algorithm, sequence && usable(p, "fft") ? "no transform saves enough" : why_not_winograd(p, usable)};
    }
  return {};
}

AI3_ALGORITHM_WITHOUT_KERNEL(conv2d, default, .accuracy = Accuracy::bounded, .error_bound = 2e-5, .choose = choose)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

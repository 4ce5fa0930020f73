// Exponentials of what is not above 0, as softmax and attention take them of scores less the largest one.
#pragma once
#include <initializer_list>

#include "simd.h"

namespace ai3::inline AI3_LEVEL {

// exp(v) of v <= 0, or a little more; 0 where that is no normal number. v log2(e) = n + r, |r| <= 1/2, and r is rounded once
// where multiply-adds are: a polynomial of 2^r, within 1.2e-7, times 2^n, whose bits are those of the sum by which it was rounded
// to n.
inline constexpr double kLog2E = 1.4426950408889634;
AI3_INLINE Vec<float> exp_below(Vec<float> v) {
  using Raw = Vec<float>::Raw;
  const Vec<float> x = at_least(Vec<float>(-88.0297f), v), log2e(static_cast<float>(kLog2E)), magic(12582912.f + 127.f);
  const Vec<float> z = fma(x, log2e, magic), r = fma(x, log2e, Vec<float>(magic.raw - z.raw));
  Vec<float> e = 0.0013264727f;
  for (float c : {0.0096715126f, 0.05550734f, 0.24022242f, 0.69314698f, 1.f}) e = fma(e, r, Vec<float>(c));
  return e * Vec<float>(detail::bit_cast<Raw>(detail::bit_cast<detail::Words>(z.raw) << 23));
}
AI3_INLINE Vec<double> exp_below(Vec<double> v) {
  using Raw = Vec<double>::Raw;
  typedef uint64_t Longs __attribute__((vector_size(AI3_VECTOR_BYTES)));
  const Vec<double> x = at_least(Vec<double>(-709.0895), v), log2e(kLog2E), magic(6755399441055744. + 1023.);
  const Vec<double> z = fma(x, log2e, magic),
                    r = Vec<double>(0.69314718055994531) * fma(x, log2e, Vec<double>(magic.raw - z.raw));
  Vec<double> e = 1. / 6227020800;  // the exponential series
  for (double c : {1. / 479001600, 1. / 39916800, 1. / 3628800, 1. / 362880, 1. / 40320, 1. / 5040, 1. / 720, 1. / 120, 1. / 24,
                   1. / 6, .5, 1., 1.})
    e = fma(e, r, Vec<double>(c));
  return e * Vec<double>(detail::bit_cast<Raw>(detail::bit_cast<Longs>(z.raw) << 52));
}

}  // namespace ai3::inline AI3_LEVEL

// What a packed operator fuses into its store: activation(v), after bias and residual. As ATen defines each, NaN included.
#pragma once
#include "problem.h"
#include "simd.h"

namespace ai3::inline AI3_LEVEL {

namespace detail {
typedef int32_t SignedWords __attribute__((vector_size(AI3_VECTOR_BYTES)));
}

// e^v. Float: range reduction by ln 2 in two parts (Cody & Waite 1980) and a Taylor polynomial, within 1e-7; the result is scaled
// by a power of two in two steps, so that subnormal and infinite results come out as such.
AI3_INLINE Vec<float> exp(Vec<float> v) {
  using Raw = Vec<float>::Raw;
  const Raw low = Vec<float>(-104.f).raw, high = Vec<float>(89.f).raw, least = v.raw < low ? low : v.raw;
  const Raw x = least > high ? high : least, magic = Vec<float>(12582912.f).raw;  // 1.5 * 2^23: adding it rounds to an integer
  const Raw shifted = x * 1.44269504f + magic, n = shifted - magic;
  const Vec<float> r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  Vec<float> e = 1.f / 5040;
  for (float c : {1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, .5f, 1.f, 1.f}) e = fma(e, r, Vec<float>(c));
  const detail::SignedWords power = detail::bit_cast<detail::SignedWords>(shifted) - 0x4b400000, half = power >> 1;
  auto two_to_the = [](detail::SignedWords k) { return Vec<float>(detail::bit_cast<Raw>((k + 127) << 23)); };
  return e * two_to_the(half) * two_to_the(power - half);
}
AI3_INLINE Vec<double> exp(Vec<double> v) {
  for (int i = 0; i < Vec<double>::width; i++) v.raw[i] = __builtin_exp(v[i]);
  return v;
}

// The standard normal distribution function, (1 + erf(v / sqrt 2)) / 2. Float: Abramowitz & Stegun 7.1.26, within 3e-7.
AI3_INLINE Vec<float> normal_cdf(Vec<float> v) {
  using Raw = Vec<float>::Raw;
  const Vec<float> z = (v.raw < Raw{} ? -v.raw : v.raw) * 0.70710678f, t = Vec<float>(1.f) / fma(z, 0.3275911f, Vec<float>(1.f));
  Vec<float> p = 1.061405429f;
  for (float c : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f}) p = fma(p, t, Vec<float>(c));
  const Vec<float> tail = p * t * exp(Raw{} - z.raw * z.raw) * Vec<float>(.5f);
  return v.raw > Raw{} ? 1.f - tail.raw : tail.raw;
}
AI3_INLINE Vec<double> normal_cdf(Vec<double> v) {
  for (int i = 0; i < Vec<double>::width; i++) v.raw[i] = .5 * __builtin_erfc(-v[i] * 0.70710678118654752440);
  return v;
}

template <class A>
AI3_INLINE Vec<A> activate(Activation activation, Vec<A> v) {
  using Raw = typename Vec<A>::Raw;
  auto relu6 = [](Vec<A> x) {
    const Raw six = Vec<A>(6).raw, y = relu(x).raw;
    return Vec<A>(y > six ? six : y);
  };
  switch (activation) {
    case Activation::none: return v;
    case Activation::relu: return relu(v);
    case Activation::relu6: return relu6(v);
    case Activation::hardswish: return v * relu6(v + Vec<A>(3)) / Vec<A>(6);
    case Activation::silu: return v / (Vec<A>(1) + exp(Raw{} - v.raw));
    case Activation::gelu: return v * normal_cdf(v);
  }
  return v;
}

}  // namespace ai3::inline AI3_LEVEL

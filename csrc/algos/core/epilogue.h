// What a packed operator fuses into its store: activation(v), after bias and residual. As ATen defines each, NaN included.
#pragma once
#include <initializer_list>

#include "problem.h"
#include "simd.h"

namespace ai3::inline AI3_LEVEL {

namespace detail {
typedef int32_t SignedWords __attribute__((vector_size(AI3_VECTOR_BYTES)));
}

// v = n ln 2 + r, |r| <= ln 2 / 2, by ln 2 in two parts (Cody & Waite 1980).
struct Reduced {
  Vec<float> r, n;
};
AI3_INLINE Reduced reduced(Vec<float> v) {
  using Raw = Vec<float>::Raw;
  const Raw magic = Vec<float>(12582912.f).raw;  // 1.5 * 2^23: adding it rounds to an integer
  const Raw n = v.raw * 1.44269504f + magic - magic;
  return {(v.raw - n * 0.693359375f) - n * -2.12194440e-4f, n};
}
// v 2^n, where the power alone is no subnormal number and not infinite.
AI3_INLINE Vec<float> scaled(Vec<float> v, detail::SignedWords n) {
  return v * Vec<float>(detail::bit_cast<Vec<float>::Raw>((n + 127) << 23));
}
// v 2^n with subnormal and infinite results as such. AVX-512 has an instruction; elsewhere in two steps.
AI3_INLINE Vec<float> scaled(Vec<float> v, Vec<float> n) {
#if AI3_VECTOR_BYTES == 64
  Vec<float>::Raw out;
  asm("vscalefps %2, %1, %0" : "=v"(out) : "v"(v.raw), "v"(n.raw));
  return out;
#else
  const detail::SignedWords power = __builtin_convertvector(n.raw, detail::SignedWords), half = power >> 1;
  return scaled(scaled(v, half), power - half);
#endif
}

// e^v. Float: a Taylor polynomial of the reduced v, within 1e-7.
AI3_INLINE Vec<float> exp(Vec<float> v) {
  const auto [r, n] = reduced(at_most(Vec<float>(89.f), at_least(Vec<float>(-104.f), v)));
  Vec<float> e = 1.f / 5040;
  for (float c : {1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, .5f, 1.f, 1.f}) e = fma(e, r, Vec<float>(c));
  return scaled(e, n);
}
AI3_INLINE Vec<double> exp(Vec<double> v) {
  for (int i = 0; i < Vec<double>::width; i++) v.raw[i] = __builtin_exp(v[i]);
  return v;
}

// e^v - 1, of v <= 0. Float: as exp, but 1 is subtracted from the power of two, which loses nothing where v is small: within 2
// units in the last place.
AI3_INLINE Vec<float> exp_minus_one(Vec<float> v) {
  const auto [r, n] = reduced(at_most(Vec<float>(0.f), at_least(Vec<float>(-20.f), v)));  // below, the result is -1
  Vec<float> e = 1.f / 5040;
  for (float c : {1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, .5f}) e = fma(e, r, Vec<float>(c));
  const Vec<float> scale = scaled(Vec<float>(1.f), n);
  return fma(scale, fma(r * r, e, r), scale - Vec<float>(1.f));
}
AI3_INLINE Vec<double> exp_minus_one(Vec<double> v) {
  for (int i = 0; i < Vec<double>::width; i++) v.raw[i] = __builtin_expm1(v[i]);
  return v;
}

// Float: within 4 units in the last place; 0 below -88.7, where it is less than 3e-39.
template <class A>
AI3_INLINE Vec<A> sigmoid(Vec<A> v) {
  const Vec<A> one(A(1));
  return one / (one + exp(Vec<A>(typename Vec<A>::Raw{} - v.raw)));
}
// Float: within 4 units in the last place. tanh(-|v|) = t / (2 + t), t = e^(-2|v|) - 1.
template <class A>
AI3_INLINE Vec<A> tanh(Vec<A> v) {
  using Raw = typename Vec<A>::Raw;
  const Vec<A> below = v.raw < Raw{} ? v.raw : -v.raw, t = exp_minus_one(below + below), y = t / (Vec<A>(A(2)) + t);
  return v.raw < Raw{} ? y.raw : v.raw > Raw{} ? -y.raw : v.raw;  // 0 keeps its sign
}

// The standard normal distribution function, (1 + erf(v / sqrt 2)) / 2. Float: Abramowitz & Stegun 7.1.26, within 3e-7.
AI3_INLINE Vec<float> normal_cdf(Vec<float> v) {
  using Raw = Vec<float>::Raw;
  const Vec<float> z = (v.raw < Raw{} ? -v.raw : v.raw) * 0.70710678f, t = Vec<float>(1.f) / fma(z, 0.3275911f, Vec<float>(1.f));
  Vec<float> p = 1.061405429f;
  for (float c : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f}) p = fma(p, t, Vec<float>(c));
  const Vec<float> tail = p * t * exp(Vec<float>(Raw{} - z.raw * z.raw)) * Vec<float>(.5f);
  return v.raw > Raw{} ? 1.f - tail.raw : tail.raw;
}
AI3_INLINE Vec<double> normal_cdf(Vec<double> v) {
  for (int i = 0; i < Vec<double>::width; i++) v.raw[i] = .5 * __builtin_erfc(-v[i] * 0.70710678118654752440);
  return v;
}

template <class A>
AI3_INLINE Vec<A> relu6(Vec<A> v) {
  return at_most(Vec<A>(A(6)), relu(v));
}
// relu6(v + 3) / 6, without the division: 6 times the rounded sixth is 1. So hardswish is finite where six times v is not.
template <class A>
AI3_INLINE Vec<A> hardsigmoid(Vec<A> v) {
  return relu6(v + Vec<A>(3)) * Vec<A>(A(1) / A(6));
}
template <class A>
AI3_INLINE Vec<A> prelu(Vec<A> v, Vec<A> slope) {
  const Vec<A> below = v * slope;
  return v.raw < typename Vec<A>::Raw{} ? below.raw : v.raw;
}

// `slope` is read where has_slope(activation).
template <class A>
AI3_INLINE Vec<A> activate(Activation activation, Vec<A> v, Vec<A> slope = A(0)) {
  using Raw = typename Vec<A>::Raw;
  switch (activation) {
    case Activation::none: return v;
    case Activation::relu: return relu(v);
    case Activation::relu6: return relu6(v);
    case Activation::hardswish: return v * hardsigmoid(v);
    case Activation::silu: return v / (Vec<A>(1) + exp(Vec<A>(Raw{} - v.raw)));
    case Activation::gelu: return v * normal_cdf(v);
    case Activation::sigmoid: return sigmoid(v);
    case Activation::hardsigmoid: return hardsigmoid(v);
    case Activation::tanh: return tanh(v);
    case Activation::gelu_tanh:  // v (1 + tanh u) / 2 = v sigmoid(2 u)
      return v * sigmoid(v * Vec<A>(A(1.5957691216057308)) * fma(v * v, Vec<A>(A(0.044715)), Vec<A>(1)));
    case Activation::prelu: return prelu(v, slope);
    case Activation::elu: {
      const Vec<A> below = slope * exp_minus_one(v);
      return v.raw > Raw{} ? v.raw : below.raw;
    }
  }
  return v;
}

// Those that a store does not inline, which would be much code in every kernel and make it slower for the others: a loop of its
// own stores them, with a call for each vector but prelu's.
AI3_INLINE constexpr bool is_called(Activation a) { return a > Activation::gelu; }
// Those that kernels apply to sums that are still in registers. Each is a store loop of its own in every one of them, so only the
// commonest of few instructions are, and after a residual only relu.
AI3_INLINE constexpr bool is_applied_in_registers(Activation a, bool residual) {
  return a <= (residual ? Activation::relu : Activation::hardswish);
}
// store(constant) with the activation as a constant, after a residual or not.
template <class Store>
AI3_INLINE void with_registers(Activation a, bool residual, const Store& store) {
  using enum Activation;
  if (residual) return a == none ? store.template operator()<none, true>() : store.template operator()<relu, true>();
  if (a == none) return store.template operator()<none, false>();
  if (a == relu) return store.template operator()<relu, false>();
  if (a == relu6) return store.template operator()<relu6, false>();
  store.template operator()<hardswish, false>();
}
// Of those that are not called.
template <class A>
AI3_INLINE Vec<A> activate_inline(Activation activation, Vec<A> v) {
  if (is_called(activation)) __builtin_unreachable();
  return activate(activation, v);
}
template <class A>
[[gnu::noinline]] Vec<A> activate_called(Activation activation, Vec<A> v, Vec<A> slope) {
  if (!is_called(activation)) __builtin_unreachable();
  return activate(activation, v, slope);
}
// `slopes()` loads those of the vector's channels.
template <bool called, class A, class Slopes>
AI3_INLINE Vec<A> activate_stored(Activation activation, Vec<A> v, const Slopes& slopes) {
  if constexpr (!called) return activate_inline(activation, v);
  if (activation == Activation::prelu) return prelu(v, slopes());
  return activate_called(activation, v, has_slope(activation) ? slopes() : Vec<A>(A(0)));
}

}  // namespace ai3::inline AI3_LEVEL

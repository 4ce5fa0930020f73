// What the problems of several operations are made of. Each operation's own stands in csrc/algos/<operation>/problem.h: a plain
// description of what to compute, without tensors or ownership. Sizes are in elements unless a name says otherwise; -1 is unknown
// (in queries only: `supports` may then not depend on it, rules and costs make do without it).
#pragma once
#include <array>
#include <cstdint>

#include "dtype.h"
#include "operands.h"

namespace ai3 {

// Fused into the store, after bias and residual. The last two have a number for each output channel: prelu its slope below zero,
// which leaky ReLU has, too, elu its alpha.
enum class Activation : int32_t { none, relu, relu6, hardswish, silu, gelu, sigmoid, hardsigmoid, tanh, gelu_tanh, prelu, elu };
AI3_INLINE constexpr bool has_slope(Activation a) { return a >= Activation::prelu; }
AI3_INLINE constexpr uint32_t activation_bit(Activation a) { return 1u << static_cast<int>(a); }

struct Strides4 {
  int64_t n, c, h, w;
};

// A problem's members as one array of numbers: its value, by which prepared calls are kept.
template <class M>
inline constexpr int kNumbersIn = 1;
template <>
inline constexpr int kNumbersIn<Strides4> = 4;
template <>
inline constexpr int kNumbersIn<Parameters> = Parameters::kAtMost;
template <class T, size_t n>
inline constexpr int kNumbersIn<std::array<T, n>> = static_cast<int>(n);
template <class T>
AI3_INLINE void append_numbers(int64_t*& to, T value) {
  *to++ = static_cast<int64_t>(value);
}
AI3_INLINE void append_numbers(int64_t*& to, const Strides4& s) { *to++ = s.n, *to++ = s.c, *to++ = s.h, *to++ = s.w; }
AI3_INLINE void append_numbers(int64_t*& to, const Parameters& p) {
  for (const int64_t value : p.values) *to++ = value;
}
AI3_INLINE void append_numbers(int64_t*& to, double value) { __builtin_memcpy(to++, &value, sizeof(value)); }
template <class T, size_t n>
AI3_INLINE void append_numbers(int64_t*& to, const std::array<T, n>& all) {
  for (const T& value : all) append_numbers(to, value);
}
template <class... M>
AI3_INLINE auto as_numbers(const M&... members) {
  std::array<int64_t, static_cast<size_t>((0 + ... + kNumbersIn<M>))> all;
  int64_t* to = &all[0];
  (append_numbers(to, members), ...);
  return all;
}

}  // namespace ai3

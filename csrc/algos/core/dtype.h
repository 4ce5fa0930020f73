// Storage types. bfloat16 and float16 are only stored: arithmetic is done in the accumulator type Acc<T>.
#pragma once
#include <cstdint>
#include <cstring>

// Force-inlined so that no copy of a shared helper is emitted with one level's instructions and called by another's.
#define AI3_INLINE [[gnu::always_inline]] inline

namespace ai3 {

// What tensors hold. Algorithms compute in the first four; operands such as masks and lengths may have the others.
enum class DType : int32_t { f64, f32, bf16, f16, i64, i32, boolean };

struct bfloat16 {
  uint16_t bits;
};
struct float16 {
  uint16_t bits;
};

AI3_INLINE float bits_to_float(uint32_t bits) {
  float f;
  __builtin_memcpy(&f, &bits, 4);
  return f;
}
AI3_INLINE uint32_t float_to_bits(float f) {
  uint32_t bits;
  __builtin_memcpy(&bits, &f, 4);
  return bits;
}

AI3_INLINE float widen(bfloat16 x) { return bits_to_float(static_cast<uint32_t>(x.bits) << 16); }
AI3_INLINE float widen(float x) { return x; }
AI3_INLINE double widen(double x) { return x; }
// IEEE 754 binary16 -> binary32, exact: subnormals are scaled up by a power of two.
AI3_INLINE float widen(float16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16, rest = x.bits & 0x7fffu;
  if (rest >= 0x7c00u) return bits_to_float(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  const float magnitude = bits_to_float(rest << 13) * bits_to_float(0x77800000u);  // 2^112
  return bits_to_float(sign | float_to_bits(magnitude));
}

// Rounding to nearest, ties to even; NaN stays NaN.
AI3_INLINE void narrow(float f, bfloat16& out) {
  const uint32_t u = float_to_bits(f);
  out.bits = (u & 0x7fffffffu) > 0x7f800000u ? static_cast<uint16_t>(u >> 16 | 0x40u)
                                             : static_cast<uint16_t>((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}
AI3_INLINE void narrow(float f, float16& out) {
  const uint32_t u = float_to_bits(f), sign = u >> 16 & 0x8000u, a = u & 0x7fffffffu;
  if (a > 0x7f800000u) {
    out.bits = static_cast<uint16_t>(sign | 0x7e00u);
  } else if (a >= 0x477ff000u) {  // rounds to 65536 or more: infinity
    out.bits = static_cast<uint16_t>(sign | 0x7c00u);
  } else if (a < 0x38800000u) {  // subnormal: adding 0.5 rounds at 2^-24
    out.bits = static_cast<uint16_t>(sign | (float_to_bits(bits_to_float(a) + 0.5f) - 0x3f000000u));
  } else {
    out.bits = static_cast<uint16_t>(sign | (a - 0x38000000u + 0xfffu + (a >> 13 & 1u)) >> 13);
  }
}
AI3_INLINE void narrow(float f, float& out) { out = f; }
AI3_INLINE void narrow(double d, double& out) { out = d; }

template <class T>
struct AccType {
  using type = float;
};
template <>
struct AccType<double> {
  using type = double;
};
// What values of storage type T are computed in.
template <class T>
using Acc = typename AccType<T>::type;

template <class T>
AI3_INLINE T narrowed(Acc<T> value) {
  T out;
  narrow(value, out);
  return out;
}

template <class T>
inline constexpr DType dtype_of = DType::f32;
template <>
inline constexpr DType dtype_of<double> = DType::f64;
template <>
inline constexpr DType dtype_of<bfloat16> = DType::bf16;
template <>
inline constexpr DType dtype_of<float16> = DType::f16;

AI3_INLINE constexpr int64_t size_of(DType t) {
  return t == DType::f64 || t == DType::i64 ? 8 : t == DType::f32 || t == DType::i32 ? 4 : t == DType::boolean ? 1 : 2;
}
AI3_INLINE constexpr const char* name_of(DType t) {
  return t == DType::f64    ? "float64"
         : t == DType::f32  ? "float32"
         : t == DType::bf16 ? "bfloat16"
         : t == DType::f16  ? "float16"
         : t == DType::i64  ? "int64"
         : t == DType::i32  ? "int32"
                            : "bool";
}

}  // namespace ai3

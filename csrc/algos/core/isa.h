// The instruction-set level that this translation unit is compiled for. csrc/algos is compiled once per level, each in an
// inline namespace of that name (`namespace ai3::inline AI3_LEVEL`), so that no function is shared between levels: the linker
// keeps one copy of an inline function, and an AVX-512 copy must never be what the portable level calls.
#pragma once
#include <cstdlib>

#ifndef AI3_LEVEL
#define AI3_LEVEL portable
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define AI3_VECTOR_BYTES 64
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define AI3_VECTOR_BYTES 32
#else
#define AI3_VECTOR_BYTES 16
#endif

#define AI3_STRINGIZE_(x) #x
#define AI3_STRINGIZE(x) AI3_STRINGIZE_(x)

namespace ai3::inline AI3_LEVEL {

// An environment variable that is 0.
inline bool is_switched_off(const char* variable) {
  const char* wanted = std::getenv(variable);
  return wanted && wanted[0] == '0' && !wanted[1];
}

// Whether AVX512-BF16 is used, which level avx512 does not imply: where the processor has it, unless AI3_OPS_BF16 is 0.
inline bool uses_bf16_instructions() {
#if defined(__x86_64__)
  static const bool used = __builtin_cpu_supports("avx512bf16") && !is_switched_off("AI3_OPS_BF16");
  return used;
#else
  return false;
#endif
}

}  // namespace ai3::inline AI3_LEVEL

// CUDA's half type on the host, by the project's own conversions, which core_test.cpp tests for every pattern.
#pragma once
#include "../../../csrc/algos/core/dtype.h"

using __half = ai3::float16;
inline __half __ushort_as_half(unsigned short bits) { return {bits}; }
inline unsigned short __half_as_ushort(__half h) { return h.bits; }
inline float __half2float(__half h) { return ai3::widen(h); }
inline __half __float2half_rn(float f) { return ai3::narrowed<__half>(f); }

// What core/simd.h compiles to at one instruction-set level, for core_test.cpp.
#pragma once
#include "../../csrc/algos/core/algorithm.h"

struct LevelFunctions {
  const char* level;
  // Vector conversions of `count` elements, the last ones by load_partial and store_partial.
  void (*widen_bfloat16)(const ai3::bfloat16*, float*, int64_t count);
  void (*widen_float16)(const ai3::float16*, float*, int64_t count);
  void (*narrow_bfloat16)(const float*, ai3::bfloat16*, int64_t count);
  void (*narrow_float16)(const float*, ai3::float16*, int64_t count);
  void (*relu)(const float*, float*, int64_t count);
  // counts[i] += 1 for the i of every call of the body, by parallel_for (grain 0) or parallel_ranges.
  void (*parallel)(int threads, int64_t count, int64_t grain, int* counts, int* thread_at_most);
};

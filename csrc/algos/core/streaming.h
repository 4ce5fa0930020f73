// Stores that pass the caches.
#pragma once
#include "problem.h"
#include "simd.h"

namespace ai3::inline AI3_LEVEL {

// Stores past the caches: a line is neither read before it is written nor kept. For whole aligned lines of 64 bytes only: a
// vector that is a part of one is stored as ever.
template <class T, class V>
AI3_INLINE void store_streaming(T* p, V v) {
#if AI3_VECTOR_BYTES == 64
  if constexpr (sizeof(T) == 4) return _mm512_stream_ps(p, v.raw);
  if constexpr (sizeof(T) == 8) return _mm512_stream_pd(p, v.raw);
#endif
  store(p, v);
}
// Whether the vectors of an output in NHWC are such lines.
template <class T>
bool has_whole_lines(const Strides4& y, const void* output) {
  constexpr int64_t line = 64, size = static_cast<int64_t>(sizeof(T));
  return AI3_VECTOR_BYTES == line && y.c == 1 &&
         ((y.n | y.h | y.w) * size | static_cast<int64_t>(reinterpret_cast<intptr_t>(output))) % line == 0;
}
// Afterwards other threads see what was stored so.
AI3_INLINE void finish_streaming() {
#if AI3_VECTOR_BYTES == 64
  _mm_sfence();
#endif
}

}  // namespace ai3::inline AI3_LEVEL

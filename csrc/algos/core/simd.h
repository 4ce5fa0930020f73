// One vector type over GCC's and Clang's vector extensions: the compiler chooses the instructions of the level.
// At the level `counting` (tests only) every multiplication is counted, which shows that a method saves what it claims.
#pragma once
#include "dtype.h"
#include "isa.h"
#if AI3_VECTOR_BYTES > 16
#include <immintrin.h>
#endif

namespace ai3::inline AI3_LEVEL {

#ifdef AI3_COUNT_OPERATIONS
extern int64_t multiplications;  // of scalars; a vector operation counts its width. Not atomic: count on one thread.
AI3_INLINE void count_multiplications(int64_t n) { multiplications += n; }
#else
AI3_INLINE void count_multiplications(int64_t) {}
#endif

template <class A>
struct RawVec;
template <>
struct RawVec<float> {
  typedef float type __attribute__((vector_size(AI3_VECTOR_BYTES)));
};
template <>
struct RawVec<double> {
  typedef double type __attribute__((vector_size(AI3_VECTOR_BYTES)));
};

template <class A>  // A: float or double
struct Vec {
  static constexpr int width = AI3_VECTOR_BYTES / static_cast<int>(sizeof(A));
  using Raw = typename RawVec<A>::type;
  Raw raw;

  Vec() = default;
  AI3_INLINE Vec(Raw r) : raw(r) {}
  AI3_INLINE Vec(A scalar) : raw(scalar - Raw{}) {}
  AI3_INLINE A operator[](int i) const { return raw[i]; }

  AI3_INLINE friend Vec operator+(Vec a, Vec b) { return a.raw + b.raw; }
  AI3_INLINE friend Vec operator-(Vec a, Vec b) { return a.raw - b.raw; }
  AI3_INLINE friend Vec operator*(Vec a, Vec b) {
    count_multiplications(width);
    return a.raw * b.raw;
  }
  AI3_INLINE friend Vec operator/(Vec a, Vec b) { return a.raw / b.raw; }
  AI3_INLINE Vec& operator+=(Vec b) { return *this = *this + b; }
};

// a*b + c, fused where the level has it (-ffp-contract=fast).
template <class A>
AI3_INLINE Vec<A> fma(Vec<A> a, Vec<A> b, Vec<A> c) {
  count_multiplications(Vec<A>::width);
  return a.raw * b.raw + c.raw;
}
template <class A>
AI3_INLINE Vec<A> fma(Vec<A> a, A b, Vec<A> c) {
  count_multiplications(Vec<A>::width);
  return a.raw * Vec<A>(b).raw + c.raw;
}
// c - a*b
template <class A>
AI3_INLINE Vec<A> fnma(Vec<A> a, A b, Vec<A> c) {
  count_multiplications(Vec<A>::width);
  return c.raw - a.raw * Vec<A>(b).raw;
}
// A scalar product that is counted like the vector ones.
template <class A>
AI3_INLINE A fma1(A a, A b, A c) {
  count_multiplications(1);
  return a * b + c;
}
// NaN in either argument wins, as in ATen.
template <class A>
AI3_INLINE Vec<A> max_nan(Vec<A> a, Vec<A> b) {
  return (a.raw > b.raw) | (a.raw != a.raw) ? a.raw : b.raw;
}
// v, or `low` where v is less, or `high` where it is more: NaN stays NaN, and of zeros v's. One instruction, in whose place GCC
// puts a comparison and a masked move.
template <class A>
AI3_INLINE Vec<A> at_least(Vec<A> low, Vec<A> v) {
#if AI3_VECTOR_BYTES >= 32
  typename Vec<A>::Raw out;
  if constexpr (sizeof(A) == 4)
    asm("vmaxps %2, %1, %0" : "=v"(out) : "v"(low.raw), "v"(v.raw));
  else
    asm("vmaxpd %2, %1, %0" : "=v"(out) : "v"(low.raw), "v"(v.raw));
  return out;
#else
  return v.raw < low.raw ? low.raw : v.raw;
#endif
}
template <class A>
AI3_INLINE Vec<A> at_most(Vec<A> high, Vec<A> v) {
#if AI3_VECTOR_BYTES >= 32
  typename Vec<A>::Raw out;
  if constexpr (sizeof(A) == 4)
    asm("vminps %2, %1, %0" : "=v"(out) : "v"(high.raw), "v"(v.raw));
  else
    asm("vminpd %2, %1, %0" : "=v"(out) : "v"(high.raw), "v"(v.raw));
  return out;
#else
  return v.raw > high.raw ? high.raw : v.raw;
#endif
}
template <class A>
AI3_INLINE Vec<A> relu(Vec<A> a) {
  return at_least(Vec<A>(A(0)), a);
}

namespace detail {
template <class To, class From>
AI3_INLINE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}
typedef uint32_t Words __attribute__((vector_size(AI3_VECTOR_BYTES)));
typedef uint16_t Halves __attribute__((vector_size(AI3_VECTOR_BYTES / 2)));

AI3_INLINE Words round_to_bfloat16(Words u) {
  const Words rounded = (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
  return (u & 0x7fffffffu) > 0x7f800000u ? u >> 16 | 0x40u : rounded;
}
// 16 bits in each lane of 32. By intrinsics: GCC 12 makes two halves of a __builtin_convertvector, three instructions too many in
// every loop over bfloat16.
AI3_INLINE Words load_halves(const void* p) {
#if AI3_VECTOR_BYTES == 64
  const auto words = _mm512_maskz_cvtepu16_epi32(0xffff, _mm256_loadu_si256(static_cast<const __m256i*>(p)));
#elif AI3_VECTOR_BYTES == 32
  const auto words = _mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
#else
  Halves h;
  __builtin_memcpy(&h, p, sizeof(h));
  const auto words = __builtin_convertvector(h, Words);
#endif
  return bit_cast<Words>(words);
}
AI3_INLINE void store_halves(void* p, Words words) {
#if AI3_VECTOR_BYTES == 64
  const auto h = _mm512_maskz_cvtepi32_epi16(0xffff, bit_cast<__m512i>(words));
#elif AI3_VECTOR_BYTES == 32
  const auto both = bit_cast<__m256i>(words);
  const auto h = _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(both, both), 0b1000));
#else
  const auto h = __builtin_convertvector(words, Halves);
#endif
  __builtin_memcpy(p, &h, sizeof(h));
}
}  // namespace detail

template <class A>
AI3_INLINE Vec<A> load(const A* p) {
  typename Vec<A>::Raw raw;
  __builtin_memcpy(&raw, p, sizeof(raw));
  return raw;
}
template <class A>
AI3_INLINE void store(A* p, Vec<A> v) {
  __builtin_memcpy(p, &v.raw, sizeof(v.raw));
}
AI3_INLINE Vec<float> load(const bfloat16* p) { return detail::bit_cast<Vec<float>::Raw>(detail::load_halves(p) << 16); }
AI3_INLINE void store(bfloat16* p, Vec<float> v) {
  detail::store_halves(p, detail::round_to_bfloat16(detail::bit_cast<detail::Words>(v.raw)));
}
AI3_INLINE Vec<float> load(const float16* p) {
#if AI3_VECTOR_BYTES == 64
  return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif AI3_VECTOR_BYTES == 32
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  Vec<float> v;
  for (int i = 0; i < Vec<float>::width; i++) v.raw[i] = widen(p[i]);
  return v;
#endif
}
AI3_INLINE void store(float16* p, Vec<float> v) {
#if AI3_VECTOR_BYTES == 64
  // The masked form: GCC 12 warns of an uninitialized value inside the plain one.
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_maskz_cvtps_ph(0xffff, v.raw, _MM_FROUND_TO_NEAREST_INT));
#elif AI3_VECTOR_BYTES == 32
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v.raw, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < Vec<float>::width; i++) narrow(v[i], p[i]);
#endif
}

// The first n elements, 0 < n <= width, and < width for store_partial; the others read as 0 and are not touched.
template <class T>
AI3_INLINE Vec<Acc<T>> load_partial(const T* p, int64_t n) {
#if AI3_VECTOR_BYTES == 64
  if constexpr (sizeof(T) == 4) return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p);
  if constexpr (sizeof(T) == 8) return _mm512_maskz_loadu_pd(static_cast<__mmask8>((1u << n) - 1), p);
  if constexpr (sizeof(T) == 2) {
    const __m256i some = _mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << n) - 1), p);
    return load(reinterpret_cast<const T*>(&some));
  }
#elif AI3_VECTOR_BYTES == 32
  if constexpr (sizeof(T) == 2) {  // not a copy of n elements: that would be a call, for which every register is saved
    uint64_t first, last = 0;
    if (n >= 4) {
      __builtin_memcpy(&first, p, 8), __builtin_memcpy(&last, p + n - 4, 8);
      last = last >> 8 * (8 - n) >> 8 * (8 - n);  // less what `first` has
    } else {
      uint16_t some[3];
      for (int i = 0; i < 3; i++) __builtin_memcpy(&some[i], p + i * (n - 1) / 2, 2);
      first = some[0] | uint64_t{some[1]} << 16 * ((n - 1) / 2) | uint64_t{some[2]} << 16 * (n - 1);
    }
    const __m128i halves = _mm_set_epi64x(static_cast<int64_t>(last), static_cast<int64_t>(first));
    return load(reinterpret_cast<const T*>(&halves));
  }
  if constexpr (sizeof(T) == 4)
    return _mm256_maskload_ps(
        p, _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)));
  if constexpr (sizeof(T) == 8)
    return _mm256_maskload_pd(p, _mm256_cmpgt_epi64(_mm256_set1_epi64x(n), _mm256_setr_epi64x(0, 1, 2, 3)));
#endif
  T buffer[Vec<Acc<T>>::width] = {};
  for (int64_t i = 0; i < n; i++) buffer[i] = p[i];
  return load(buffer);
}
template <class T>
AI3_INLINE void store_partial(T* p, Vec<Acc<T>> v, int64_t n) {
#if AI3_VECTOR_BYTES == 64
  if constexpr (sizeof(T) == 4) return _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1), v.raw);
  if constexpr (sizeof(T) == 8) return _mm512_mask_storeu_pd(p, static_cast<__mmask8>((1u << n) - 1), v.raw);
  if constexpr (sizeof(T) == 2) {
    __m256i all;
    store(reinterpret_cast<T*>(&all), v);
    return _mm256_mask_storeu_epi16(p, static_cast<__mmask16>((1u << n) - 1), all);
  }
#elif AI3_VECTOR_BYTES == 32
  if constexpr (sizeof(T) == 2) {
    uint64_t rest[2];
    store(reinterpret_cast<T*>(rest), v);
    if (n & 4) __builtin_memcpy(p, rest, 8), p += 4, rest[0] = rest[1];
    if (n & 2) __builtin_memcpy(p, rest, 4), p += 2, rest[0] >>= 32;
    if (n & 1) __builtin_memcpy(p, rest, 2);
    return;
  }
  // In halves: AVX2's masked stores take AMD's processors a dozen cycles each.
  if constexpr (sizeof(T) == 4) {
    __m128 rest = _mm256_castps256_ps128(v.raw);
    if (n & 4) _mm_storeu_ps(p, rest), p += 4, rest = _mm256_extractf128_ps(v.raw, 1);
    if (n & 2) _mm_storel_pi(reinterpret_cast<__m64*>(p), rest), p += 2, rest = _mm_movehl_ps(rest, rest);
    if (n & 1) _mm_store_ss(p, rest);
    return;
  }
  if constexpr (sizeof(T) == 8) {
    __m128d rest = _mm256_castpd256_pd128(v.raw);
    if (n & 2) _mm_storeu_pd(p, rest), p += 2, rest = _mm256_extractf128_pd(v.raw, 1);
    if (n & 1) _mm_store_sd(p, rest);
    return;
  }
#endif
  T buffer[Vec<Acc<T>>::width];
  store(buffer, v);
  for (int64_t i = 0; i < n; i++) p[i] = buffer[i];
}

}  // namespace ai3::inline AI3_LEVEL

// Vectors of fewer elements than they have lanes; of neighbouring output columns of a row: lanes outside the image are not read.
#pragma once
#include <utility>

#include "checked.h"
#include "simd.h"

namespace ai3::inline AI3_LEVEL {

AI3_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
AI3_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// The first n (0 < n <= width) elements, the others as load_partial and store_partial have them; `whole`, where the compiler
// knows it: n == width.
template <bool whole, class T>
AI3_INLINE Vec<Acc<T>> load_some(const T* p, int64_t n) {
  return whole ? load(p) : load_partial(p, n);
}
template <class T>
AI3_INLINE Vec<Acc<T>> load_some(const T* p, int64_t n) {
  return n == Vec<Acc<T>>::width ? load(p) : load_partial(p, n);
}
template <class T>
AI3_INLINE void store_some(T* p, Vec<Acc<T>> v, int64_t n) {
  n == Vec<Acc<T>>::width ? store(p, v) : store_partial(p, v, n);
}

// The i with 0 <= first + i*step < size, of [0, count): an empty range where there is none. step > 0.
struct Range {
  int64_t begin, end;
  AI3_INLINE int64_t size() const { return end - begin; }
};
AI3_INLINE Range inside(int64_t first, int64_t step, int64_t size, int64_t count) {
  if (first >= 0 && first + (count - 1) * step < size) return {0, count};  // nearly always: no division
  const int64_t begin = first < 0 ? smaller(count, ceil_div(-first, step)) : 0;
  const int64_t end = first < size ? smaller(count, ceil_div(size - first, step)) : 0;
  return {begin, larger(begin, end)};
}

// What [offset, offset + width) holds of a range, counted from offset.
AI3_INLINE Range part_of(Range range, int64_t offset, int64_t width) {
  return {larger(0, smaller(width, range.begin - offset)), larger(0, smaller(width, range.end - offset))};
}

// `count` elements `apart`, up to 15, seven from each pointer: those are the distances that addresses of the processor hold with
// two registers, one of which is once, three or five times the step. The compiler's own way takes a register for each element,
// and keeps most of them on the stack. So it does with a pointer too many, which costs AVX2's short loops 20 % of their time, and
// with an array of pointers, which costs Intel's processors 10 %. Indices are constants of unrolled code.
template <class E, int count = 15>
struct Apart {
  static_assert(0 < count && count <= 15);
  static constexpr int64_t kSize = sizeof(E);
  intptr_t first, second = 0, third = 0;
  int64_t step, step3, step5;
  AI3_INLINE Apart(E* p, int64_t apart)
      : first(reinterpret_cast<intptr_t>(p)), step(apart * kSize), step3(3 * step), step5(5 * step) {
    // So that it does not find out how they depend on each other.
    if constexpr (count > 3) asm("" : "+r"(step3));
    if constexpr (count > 5) asm("" : "+r"(step5));
    if constexpr (count > 7) asm("" : "+r"(second = first + 7 * step));
    if constexpr (count > 14) asm("" : "+r"(third = second + 7 * step));
  }
  AI3_INLINE E* operator[](int j) const {
    const int i = j % 7;
    const intptr_t from = j < 7 ? first : j < 14 ? second : third;
    return reinterpret_cast<E*>(from + (i == 5 ? step5 : i % 3 ? i * step : i / 3 * step3));
  }
  AI3_INLINE void operator+=(int64_t elements) {
    asm("" : "+r"(first += elements * kSize));
    if constexpr (count > 7) asm("" : "+r"(second += elements * kSize));
    if constexpr (count > 14) asm("" : "+r"(third += elements * kSize));
  }
};

// Lanes 0, 2, 4, ... of `low`, then 1, 3, 5, ... of `high`.
template <class A>
AI3_INLINE Vec<A> even_odd(Vec<A> low, Vec<A> high) {
  if constexpr (Vec<A>::width == 16)
    return __builtin_shufflevector(low.raw, high.raw, 0, 2, 4, 6, 8, 10, 12, 14, 17, 19, 21, 23, 25, 27, 29, 31);
  else if constexpr (Vec<A>::width == 8)
    return __builtin_shufflevector(low.raw, high.raw, 0, 2, 4, 6, 9, 11, 13, 15);
  else if constexpr (Vec<A>::width == 4)
    return __builtin_shufflevector(low.raw, high.raw, 0, 2, 5, 7);
  else
    return __builtin_shufflevector(low.raw, high.raw, 0, 3);
}

namespace detail {
// All bits of the lanes in the range.
template <class A>
AI3_INLINE auto lane_mask(Range lanes) {
  using Index = decltype(Vec<A>{}.raw < Vec<A>{}.raw);
  Index lane, begin, end;
  for (int i = 0; i < Vec<A>::width; i++) lane[i] = i;
  begin = lane - lane + static_cast<int>(lanes.begin), end = lane - lane + static_cast<int>(lanes.end);
  return (lane >= begin) & (lane < end);
}
}  // namespace detail

// p[0], p[step], p[2*step], ... as a vector; nothing behind the last of them is read.
template <class T>
AI3_INLINE Vec<Acc<T>> load_strided(const T* p, int64_t step) {
  constexpr int width = Vec<Acc<T>>::width;
  if (step == 1) return load(p);
  if (step == 2) return even_odd(load(p), load(p + width - 1));
  T lanes[width];
  for (int i = 0; i < width; i++) lanes[i] = p[i * step];
  return load(lanes);
}
// The same for some lanes only; the others are not read and hold 0.
template <class T>
AI3_INLINE Vec<Acc<T>> load_strided(const T* p, int64_t step, Range lanes) {
  constexpr int width = Vec<Acc<T>>::width;
#if AI3_VECTOR_BYTES == 64
  if constexpr (sizeof(T) >= 4)
    if (step == 1) {
      const unsigned mask = ((1u << lanes.end) - 1) & ~((1u << lanes.begin) - 1);
      if constexpr (sizeof(T) == 4)
        return _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), p);
      else
        return _mm512_maskz_loadu_pd(static_cast<__mmask8>(mask), p);
    }
#elif AI3_VECTOR_BYTES == 32
  if constexpr (sizeof(T) >= 4)
    if (step == 1) {
      const auto mask = detail::lane_mask<Acc<T>>(lanes);
      if constexpr (sizeof(T) == 4)
        return _mm256_maskload_ps(p, (__m256i)mask);
      else
        return _mm256_maskload_pd(p, (__m256i)mask);
    }
#endif
  T values[width] = {};
  for (int64_t i = lanes.begin; i < lanes.end; i++) values[i] = p[i * step];
  return load(values);
}

// Lanes of `inner` inside the range, of `outer` outside.
template <class A>
AI3_INLINE Vec<A> select(Range lanes, Vec<A> inner, Vec<A> outer) {
  return detail::lane_mask<A>(lanes) ? inner.raw : outer.raw;
}

namespace detail {
// Exchanges the lanes i + h of `a` with the lanes i of `b`, for every i without the bit h.
template <int h, class A, int... i>
AI3_INLINE void exchange(Vec<A>& a, Vec<A>& b, std::integer_sequence<int, i...>) {
  constexpr int width = sizeof...(i);
  const Vec<A> low = __builtin_shufflevector(a.raw, b.raw, (i & h ? width + i - h : i)...);
  b = __builtin_shufflevector(a.raw, b.raw, (i & h ? width + i : i + h)...);
  a = low;
}
template <int h, class A>
AI3_INLINE void transpose_by(Vec<A> (&rows)[Vec<A>::width]) {
#pragma GCC unroll 16
  for (int i = 0; i < Vec<A>::width; i++)
    if (!(i & h)) exchange<h>(rows[i], rows[i + h], std::make_integer_sequence<int, Vec<A>::width>());
  if constexpr (h > 1) transpose_by<h / 2>(rows);
}
}  // namespace detail
// rows[i][j] becomes rows[j][i].
template <class A>
AI3_INLINE void transpose(Vec<A> (&rows)[Vec<A>::width]) {
  detail::transpose_by<Vec<A>::width / 2>(rows);
}

}  // namespace ai3::inline AI3_LEVEL

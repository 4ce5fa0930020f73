// Between planes of NCHW, whose columns follow one another, and pixels of a vector's channels: squares are transposed in
// registers.
#pragma once
#include "lanes.h"

namespace ai3::inline AI3_LEVEL {

// copy(row, elements) for rows [first, last) of a plane, `row` elements long: all in one where they are neighbours.
AI3_INLINE void each_piece(int64_t first, int64_t last, int64_t row, int64_t apart, const auto& copy) {
  if (row == apart && first < last) return copy(first, (last - first) * row);
  for (int64_t i = first; i < last; i++) copy(i, row);
}
// Elements of `lanes` planes, `plane` apart, to the lanes of vectors that are `step` apart; the others become 0.
template <class T>
[[gnu::noinline]] void to_lanes(const T* from, int64_t plane, int64_t lanes, int64_t elements, T* to, int64_t step) {
  constexpr int64_t width = Vec<Acc<T>>::width;
  for (int64_t e = 0; e < elements; e += width) {
    const int64_t n = smaller(width, elements - e);
    Vec<Acc<T>> v[width];
#pragma GCC unroll 16
    for (int i = 0; i < width; i++) v[i] = i < lanes ? load_some(from + i * plane + e, n) : Vec<Acc<T>>(Acc<T>(0));
    transpose(v);
#pragma GCC unroll 16
    for (int i = 0; i < width; i++)
      if (i < n) store(to + (e + i) * step, v[i]);
  }
}
// And back, of some lanes.
template <class T>
[[gnu::noinline]] void to_planes(const T* from, int64_t step, Range lanes, int64_t elements, T* to, int64_t plane) {
  constexpr int64_t width = Vec<Acc<T>>::width;
  for (int64_t e = 0; e < elements; e += width) {
    const int64_t n = smaller(width, elements - e);
    Vec<Acc<T>> v[width];
#pragma GCC unroll 16
    for (int i = 0; i < width; i++) v[i] = i < n ? load(from + (e + i) * step) : Vec<Acc<T>>(Acc<T>(0));
    transpose(v);
#pragma GCC unroll 16
    for (int i = 0; i < width; i++)
      if (i >= lanes.begin && i < lanes.end) store_some(to + i * plane + e, v[i], n);
  }
}

}  // namespace ai3::inline AI3_LEVEL

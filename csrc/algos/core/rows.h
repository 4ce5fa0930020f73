// Copies of elements that lie at any two strides.
#pragma once
#include "gemm.h"

namespace ai3::inline AI3_LEVEL {

// `pixels` x `channels` elements into rows `ld` apart; from's channels or, failing that, its pixels had better be contiguous.
template <class T>
void copy_rows(const T* from, int64_t pixel_stride, int64_t channel_stride, int64_t pixels, int64_t channels, Acc<T>* to,
               int64_t ld) {
  using A = Acc<T>;
  constexpr int64_t width = Vec<A>::width;
  if (channel_stride == 1) {
    for (int64_t i = 0; i < pixels; i++, from += pixel_stride, to += ld)
      if (channels == 2 * width)
        store(to, load(from)), store(to + width, load(from + width));
      else
        copy_widened(from, channels, to);
  } else if (pixel_stride == 1) {  // squares turn in registers
    for (int64_t c = 0; c < channels; c += width)
      for (int64_t i = 0; i < pixels; i += width) {
        const int64_t rows = smaller(width, channels - c), columns = smaller(width, pixels - i);
        Vec<A> square[width];
#pragma GCC unroll 16
        for (int64_t j = 0; j < width; j++) {
          const T* row = from + (c + j) * channel_stride + i;
          square[j] = j >= rows ? Vec<A>(A{0}) : columns == width ? load(row) : load_partial(row, columns);
        }
        transpose(square);
#pragma GCC unroll 16
        for (int64_t j = 0; j < width; j++)
          if (j < columns) {
            A* row = to + (i + j) * ld + c;
            rows == width ? store(row, square[j]) : store_partial(row, square[j], rows);
          }
      }
  } else {
    for (int64_t i = 0; i < pixels; i++)
      for (int64_t c = 0; c < channels; c++) to[i * ld + c] = widen(from[i * pixel_stride + c * channel_stride]);
  }
}

}  // namespace ai3::inline AI3_LEVEL

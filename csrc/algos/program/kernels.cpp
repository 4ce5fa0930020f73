#include "kernels.h"

#include "../core/epilogue.h"
#include "../core/lanes.h"

namespace ai3::inline AI3_LEVEL {
namespace {

constexpr int64_t kGrain = 1 << 14;  // elements that are worth another thread

// body(begin, lanes) over `count` elements of a row: whole vectors, then what is left.
template <class A, class Body>
AI3_INLINE void for_vectors(int64_t count, const Body& body) {
  constexpr int64_t width = Vec<A>::width;
  int64_t i = 0;
  for (; i + width <= count; i += width) body(i, width);
  if (i < count) body(i, count - i);
}
template <class T>
AI3_INLINE Vec<Acc<T>> load_some(const T* from, int64_t lanes) {
  return lanes == Vec<Acc<T>>::width ? load(from) : load_partial(from, lanes);
}
template <class T>
AI3_INLINE void store_some(T* to, Vec<Acc<T>> v, int64_t lanes) {
  lanes == Vec<Acc<T>>::width ? store(to, v) : store_partial(to, v, lanes);
}

template <MapKind kind, Activation activation, class T>
void map_rows(const MapProblem& p, const Buffers& m) {
  using A = Acc<T>;
  using V = Vec<A>;
  const T *x = static_cast<const T*>(m.input), *z = static_cast<const T*>(m.weight);
  const A *scale = static_cast<const A*>(m.scale), *shift = static_cast<const A*>(m.shift);
  T* y = static_cast<T*>(m.output);
  const int64_t rows = p.images * p.rows, channels = p.channels;
  // Short rows are told apart by a multiplication; one long row is cut into pieces.
  const int64_t piece = rows >= 4 * p.threads ? channels : smaller(channels, kGrain), pieces = ceil_div(channels, piece);
  parallel_ranges(p.threads, rows * pieces, ceil_div(kGrain, piece), [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t row = i / pieces, c = i % pieces * piece, count = smaller(piece, channels - c);
      const T *xr = x + row * p.x_row + c, *zr = z + (p.z_per_image ? row / p.rows : row) * p.z_row + c;
      T* yr = y + row * p.y_row + c;
      for_vectors<A>(count, [&](int64_t j, int64_t lanes) {
        V v = load_some(xr + j, lanes);
        if constexpr (kind == MapKind::add) v += load_some(zr + j, lanes);
        if constexpr (kind == MapKind::multiply) v = v * load_some(zr + j, lanes);
        if constexpr (kind == MapKind::affine) {
          if (scale) v = v * load_some(scale + c + j, lanes);
          if (shift) v += load_some(shift + c + j, lanes);
        }
        store_some(yr + j, activate(activation, v), lanes);
      });
    }
  });
}

// body.operator()<kind, activation>() for those of p.
template <class Body>
AI3_INLINE void with_kind(const MapProblem& p, const Body& body) {
  auto with_activation = [&]<MapKind kind>() {
    switch (p.activation) {
      case Activation::none: return body.template operator()<kind, Activation::none>();
      case Activation::relu: return body.template operator()<kind, Activation::relu>();
      case Activation::relu6: return body.template operator()<kind, Activation::relu6>();
      case Activation::hardswish: return body.template operator()<kind, Activation::hardswish>();
      case Activation::silu: return body.template operator()<kind, Activation::silu>();
      case Activation::gelu: return body.template operator()<kind, Activation::gelu>();
    }
  };
  switch (p.kind) {
    case MapKind::activate: return with_activation.template operator()<MapKind::activate>();
    case MapKind::add: return with_activation.template operator()<MapKind::add>();
    case MapKind::multiply: return with_activation.template operator()<MapKind::multiply>();
    case MapKind::affine: return with_activation.template operator()<MapKind::affine>();
  }
}

void map(const MapProblem& p, const Buffers& m) {
  with_type(p.dtype, [&]<class T>() {
    with_kind(p, [&]<MapKind kind, Activation activation>() { map_rows<kind, activation, T>(p, m); });
  });
}

// `rows` x `columns` elements, contiguous along columns in `from` and along rows in `to`: squares turn in registers.
template <class T>
void turn(const T* from, int64_t from_row, int64_t rows, int64_t columns, T* to, int64_t to_column) {
  using V = Vec<Acc<T>>;
  constexpr int64_t width = V::width;
  for (int64_t c = 0; c < columns; c += width)
    for (int64_t r = 0; r < rows; r += width) {
      const int64_t down = smaller(width, rows - r), across = smaller(width, columns - c);
      V square[width];
#pragma GCC unroll 16
      for (int64_t j = 0; j < width; j++) square[j] = j < down ? load_some(from + (r + j) * from_row + c, across) : V(Acc<T>(0));
      transpose(square);
#pragma GCC unroll 16
      for (int64_t j = 0; j < width; j++)
        if (j < across) store_some(to + (c + j) * to_column + r, square[j], down);
    }
}

template <class T>
void copy_of(const CopyProblem& p, const T* x, T* y) {
  const Strides4 &from = p.x_stride, &to = p.y_stride;
  const int64_t line = p.width * p.channels, lines = p.batch * p.height;
  parallel_ranges(p.threads, lines, ceil_div(kGrain, line), [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; i++) {
      const T* xi = x + i / p.height * from.n + i % p.height * from.h;
      T* yi = y + i / p.height * to.n + i % p.height * to.h;
      if (from.c == 1 && to.c == 1) {
        const auto bytes = static_cast<size_t>(p.channels) * sizeof(T);
        if (from.w == p.channels && to.w == p.channels)
          __builtin_memcpy(yi, xi, bytes * static_cast<size_t>(p.width));
        else
          for (int64_t w = 0; w < p.width; w++) __builtin_memcpy(yi + w * to.w, xi + w * from.w, bytes);
      } else if (from.w == 1 && to.c == 1) {
        turn(xi, from.c, p.channels, p.width, yi, to.w);
      } else if (from.c == 1 && to.w == 1) {
        turn(xi, from.w, p.width, p.channels, yi, to.c);
      } else {
        for (int64_t w = 0; w < p.width; w++)
          for (int64_t c = 0; c < p.channels; c++) yi[w * to.w + c * to.c] = xi[w * from.w + c * from.c];
      }
    }
  });
}
void copy(const CopyProblem& p, const Buffers& m) {
  with_type(p.dtype, [&]<class T>() { copy_of(p, static_cast<const T*>(m.input), static_cast<T*>(m.output)); });
}

constinit const ProgramKernels kernels = {AI3_STRINGIZE(AI3_LEVEL), map, copy};
[[gnu::section("ai3_program_kernels"), gnu::used]] const ProgramKernels* const record = &kernels;

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

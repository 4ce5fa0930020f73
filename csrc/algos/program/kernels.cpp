#include "kernels.h"

#include <type_traits>

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

// body.operator()<function>() for p's.
template <class Body>
AI3_INLINE auto with_function(Activation function, const Body& body) {
  switch (function) {
#define AI3_CASE(name) \
  case Activation::name: return body.template operator()<Activation::name>();
    AI3_CASE(none)
    AI3_CASE(relu)
    AI3_CASE(relu6)
    AI3_CASE(hardswish)
    AI3_CASE(silu)
    AI3_CASE(gelu)
    AI3_CASE(sigmoid)
    AI3_CASE(hardsigmoid)
    AI3_CASE(tanh)
    AI3_CASE(gelu_tanh)
    AI3_CASE(prelu)
    AI3_CASE(elu)
#undef AI3_CASE
  }
}

template <class A>
[[gnu::noinline]] Vec<A> apply_called(Activation function, Vec<A> v, Vec<A> slope) {
  return activate(function, v, slope);
}

// y = f(x, z, c) of each vector, c its first channel. Short rows are taken whole; long ones in pieces where rows are few.
template <class T, class F>
AI3_INLINE void for_rows(const MapProblem& p, const MapOperands& m, const F& f) {
  using A = Acc<T>;
  const T *x = m.input.read<T>(), *z = m.other.read<T>();
  T* y = m.output.write<T>();
  const int64_t rows = p.images * p.rows, channels = p.channels;
  const int64_t piece = rows >= 4 * p.threads ? channels : smaller(channels, kGrain), pieces = ceil_div(channels, piece);
  parallel_ranges(p.threads, rows * pieces, ceil_div(kGrain, piece), [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t row = i / pieces, c = i % pieces * piece, count = smaller(piece, channels - c);
      const T *xr = x + row * p.x_row + c, *zr = z + (p.z_per_image ? row / p.rows : row) * p.z_row + c;
      T* yr = y + row * p.y_row + c;
      for_vectors<A>(
          count, [&](int64_t j, int64_t lanes) { store_some(yr + j, f(load_some(xr + j, lanes), zr + j, c + j, lanes), lanes); });
    }
  });
}

// The functions that clamp are a part of the loop; the others are called by it, but where they are all there is to do.
template <MapKind kind, class T>
void map_rows(const MapProblem& p, const MapOperands& m) {
  using A = Acc<T>;
  using V = Vec<A>;
  const A *scale = m.scale.read<A>(), *shift = m.shift.read<A>(), *slope = m.slope.read<A>();
  const bool clamps = p.function == Activation::relu || p.function == Activation::relu6,
             called = !clamps && p.function != Activation::none;
  const V low(clamps ? A(0) : static_cast<A>(-__builtin_inf())),
      high(p.function == Activation::relu6 ? A(6) : static_cast<A>(__builtin_inf()));
  for_rows<T>(p, m, [&](V v, const T* z, int64_t c, int64_t lanes) -> V {
    if constexpr (kind == MapKind::add) v += load_some(z, lanes);
    if constexpr (kind == MapKind::multiply) v = v * load_some(z, lanes);
    if constexpr (kind == MapKind::affine) {
      if (scale) v = v * load_some(scale + c, lanes);
      if (shift) v += load_some(shift + c, lanes);
    }
    if (called) return apply_called(p.function, v, has_slope(p.function) ? load_some(slope + c, lanes) : V(A(0)));
    return at_most(high, at_least(low, v));
  });
}

void map(const MapProblem& p, const MapOperands& m) {
  with_type(p.dtype, [&]<class T>() {
    switch (p.kind) {
      case MapKind::activate:
        return with_function(p.function, [&]<Activation f>() {
          const Acc<T>* slope = m.slope.read<Acc<T>>();
          for_rows<T>(p, m, [slope](Vec<Acc<T>> v, const T*, int64_t c, int64_t lanes) {
            if constexpr (has_slope(f)) return activate(f, v, load_some(slope + c, lanes));
            return activate(f, v);
          });
        });
      case MapKind::add: return map_rows<MapKind::add, T>(p, m);
      case MapKind::multiply: return map_rows<MapKind::multiply, T>(p, m);
      case MapKind::affine: return map_rows<MapKind::affine, T>(p, m);
    }
  });
}

// 16 bits of whatever type, in the lower half of a lane: as floats signalling NaN would come out quiet.
struct Bits16 {
  uint16_t bits;
};
AI3_INLINE Vec<float> load(const Bits16* p) { return detail::bit_cast<Vec<float>::Raw>(detail::load_halves(p)); }
AI3_INLINE void store(Bits16* p, Vec<float> v) { detail::store_halves(p, detail::bit_cast<detail::Words>(v.raw)); }

// Vector `part` of the three that the elements of three rows are, neighbours from the three beside each other.
template <int part, class A, int... i>
AI3_INLINE Vec<A> interleaved(Vec<A> first, Vec<A> second, Vec<A> third, std::integer_sequence<int, i...>) {
  constexpr int width = Vec<A>::width, begin = part * width;
  const Vec<A> two = __builtin_shufflevector(first.raw, second.raw, ((begin + i) / 3 + ((begin + i) % 3 == 1 ? width : 0))...);
  return __builtin_shufflevector(two.raw, third.raw, ((begin + i) % 3 == 2 ? width + (begin + i) / 3 : i)...);
}
// `rows` x `columns` elements, contiguous along columns in `from` and along rows in `to`: squares are transposed in registers, or
// the three rows of images in colour, which would fill three eighths of an AVX2 square.
template <class T>
void transpose_block(const T* from, int64_t from_row, int64_t rows, int64_t columns, T* to, int64_t to_column) {
  using V = Vec<Acc<T>>;
  constexpr int64_t width = V::width;
  int64_t c = 0;
  if (rows == 3 && to_column == 3)
    for (; c + width <= columns; c += width) {
      auto row = [&](int64_t r) { return load_some(from + r * from_row + c, width); };
      const V first = row(0), second = row(1), third = row(2);
      constexpr std::make_integer_sequence<int, V::width> lanes;
      store_some(to + 3 * c, interleaved<0>(first, second, third, lanes), width);
      store_some(to + 3 * c + width, interleaved<1>(first, second, third, lanes), width);
      store_some(to + 3 * c + 2 * width, interleaved<2>(first, second, third, lanes), width);
    }
  for (; c < columns; c += width)
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
inline constexpr bool transposes = !std::is_same_v<T, bool>;  // masks are small: no squares of bytes

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
      } else if (from.w == 1 && to.w == 1) {
        for (int64_t c = 0; c < p.channels; c++)
          __builtin_memcpy(yi + c * to.c, xi + c * from.c, static_cast<size_t>(p.width) * sizeof(T));
      } else if (transposes<T> && from.w == 1 && to.c == 1) {
        if constexpr (transposes<T>) transpose_block(xi, from.c, p.channels, p.width, yi, to.w);
      } else if (transposes<T> && from.c == 1 && to.w == 1) {
        if constexpr (transposes<T>) transpose_block(xi, from.w, p.width, p.channels, yi, to.c);
      } else {
        for (int64_t w = 0; w < p.width; w++)
          for (int64_t c = 0; c < p.channels; c++) yi[w * to.w + c * to.c] = xi[w * from.w + c * from.c];
      }
    }
  });
}
void copy(const CopyProblem& p, const UnaryOperands& m) {
  if (p.dtype == DType::boolean) return copy_of(p, m.input.read<bool>(), m.output.write<bool>());
  with_type(p.dtype, [&]<class T>() {
    using Copied = std::conditional_t<sizeof(T) == 2, Bits16, T>;
    copy_of(p, m.input.read<Copied>(), m.output.write<Copied>());
  });
}

constinit const ProgramKernels kernels = {AI3_STRINGIZE(AI3_LEVEL), map, copy};
[[gnu::section("ai3_program_kernels"), gnu::used]] const ProgramKernels* const record = &kernels;

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

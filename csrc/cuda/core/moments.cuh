// Mean and variance of some values, as normalizations take them: what csrc/algos/core/moments.h is on the CPU, by the threads of
// a block. Around a guess of the mean, whose error the sum of the differences corrects.
#pragma once
#include "../../algos/core/weight_type.h"
#include "block.cuh"

namespace ai3::inline AI3_LEVEL {

// The normalized values are (x * unit - guess - rest) * scale, where 1 / unit is a power of two, and mean and scale are those of
// x * unit. It is 1 but for values whose squares are too large or too small to be summed. The mean is a sum of two, since rounded
// to one it would be wrong by more than small differences from it are.
template <class A>
struct Moments {
  A unit, guess, rest, scale;  // scale: 1 / sqrt(variance + eps)
  A scale_of_x;                // the same of x in its own unit

  __device__ __forceinline__ A centered(A v) const { return (v * unit - guess) - rest; }
  __device__ __forceinline__ A normal(A v) const { return centered(v) * scale; }
};
// From the means of the differences from `guess` and of their squares, worked out in type S. Whether the squares could be summed.
template <class S, class A>
__device__ __forceinline__ bool moments_around(A unit, A guess, S off, S squares, S eps, Moments<A>& m) {
  constexpr double least = sizeof(A) == 4 ? 1e-30 : 1e-290;  // below it the type lacks some of the squares' bits
  const S u = unit, variance = squares - off * off;
  const S spread = (variance < 0 ? S(0) : variance) + eps * u * u, scale = S(1) / static_cast<S>(sqrt(spread));
  m = {unit, guess, static_cast<A>(off), static_cast<A>(scale), static_cast<A>(u * scale)};
  return squares < static_cast<S>(INFINITY) && spread >= static_cast<S>(least);
}

// Of the values at(0), at(1), ..., for every thread of the block, all of which call it: around their mean or, not `centered`,
// around 0. `memory` has room for two values of each warp.
template <int threads, bool centered, class S, class A, class At>
__device__ __forceinline__ bool moments_in(int64_t count, const At& at, A unit, S eps, A* memory, Moments<A>& m) {
  const A n = static_cast<A>(count);
  A guess = 0, around[2] = {0, 0};
  if constexpr (centered) {
    A sum = 0;
    for (int64_t i = threadIdx.x; i < count; i += threads) sum += at(i) * unit;
    guess = reduce<threads>(sum, memory, Sum()) / n;
  }
  for (int64_t i = threadIdx.x; i < count; i += threads) {
    const A d = at(i) * unit - guess;
    around[0] += d, around[1] += d * d;
  }
  reduce_each<threads>(around, memory, Sum());
  return moments_around<S>(unit, guess, centered ? static_cast<S>(around[0] / n) : S(0), static_cast<S>(around[1] / n), eps, m);
}

// Of values whose squares could not be summed: in a unit in which the largest is about 1, or as near to it as the type has units.
// One large value all over has no variance, and in its unit eps is less than the type can divide by, or nothing. Of other values
// scale is far below the bound, of which a few times are finite, too.
template <int threads, bool centered, class A, class At>
[[gnu::noinline]] __device__ Moments<A> moments_of_extremes(int64_t count, At at, double eps, A* memory) {
  constexpr int most = sizeof(A) == 4 ? 126 : 1022;
  constexpr double most_of_scale = sizeof(A) == 4 ? 1e30 : 1e290;
  A largest = 0;
  for (int64_t i = threadIdx.x; i < count; i += threads) {
    const A v = at(i), size = v < 0 ? -v : v;
    largest = Largest()(size < static_cast<A>(INFINITY) ? size : static_cast<A>(INFINITY), largest);
  }
  largest = reduce<threads>(largest, memory, Largest());
  A unit = 1;  // of zeros, and where one is not finite
  if (largest > 0 && largest < static_cast<A>(INFINITY)) {
    const int exponent = ilogb(static_cast<double>(largest));
    unit = static_cast<A>(ldexp(1.0, exponent > most ? -most : exponent < -most ? most : -exponent));
  }
  Moments<A> m;
  moments_in<threads, centered>(count, at, unit, eps, memory, m);
  if (eps > 0 && m.scale > static_cast<A>(most_of_scale)) m.scale = static_cast<A>(most_of_scale);
  const A most_of_x = static_cast<A>(1 / sqrt(eps));
  if (m.scale_of_x > most_of_x) m.scale_of_x = most_of_x;
  return m;
}
template <int threads, bool centered, class A, class At>
__device__ __forceinline__ Moments<A> moments_of(int64_t count, const At& at, double eps, A* memory) {
  Moments<A> m;
  if (moments_in<threads, centered>(count, at, A(1), static_cast<A>(eps), memory, m)) return m;
  return moments_of_extremes<threads, centered>(count, at, eps, memory);
}

}  // namespace ai3::inline AI3_LEVEL

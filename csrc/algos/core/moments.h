// Mean and variance of some values, as normalizations take them: around a guess of the mean, whose error the sum of the
// differences corrects (Chan, Golub & LeVeque, "Algorithms for computing the sample variance", 1983).
#pragma once
#include "lanes.h"
#include "weight_type.h"

namespace ai3::inline AI3_LEVEL {

inline constexpr int64_t kPart = 4096;  // elements that are summed in the accumulator's type

template <class A>
AI3_INLINE A sum_of(Vec<A> v) {
  A lanes[Vec<A>::width];
  store(lanes, v);
#pragma GCC unroll 4
  for (int half = Vec<A>::width / 2; half > 0; half /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
  return lanes[0];
}

// Adds up to `outputs` sums over a row: body(sums, i, load) adds those of the elements from i on to sums[0], sums[1], ...; `load`
// reads from a pointer to the row as many as there are, the rest as 0.
template <int outputs, class A, class Body>
AI3_INLINE void sum_row(int64_t features, double (&total)[outputs], const Body& body) {
  constexpr int64_t width = Vec<A>::width, together = 4;
  for (int o = 0; o < outputs; o++) total[o] = 0;
  for (int64_t part = 0; part < features; part += kPart) {
    const int64_t end = smaller(part + kPart, features);
    Vec<A> sums[together][outputs];
    for (auto& of_one : sums)
      for (auto& s : of_one) s = Vec<A>(A(0));
    int64_t i = part;
    for (; i + together * width <= end; i += together * width)
#pragma GCC unroll 4
      for (int64_t j = 0; j < together; j++) body(sums[j], i + j * width, width);
    for (; i + width <= end; i += width) body(sums[0], i, width);
    if (i < end) body(sums[0], i, end - i);
    for (int o = 0; o < outputs; o++)
      total[o] += static_cast<double>(sum_of((sums[0][o] + sums[1][o]) + (sums[2][o] + sums[3][o])));
  }
}

// body(i, n) for each vector of a row, the last of which may have fewer than `width` elements.
template <class A, class Body>
AI3_INLINE void each_vector(int64_t features, const Body& body) {
  constexpr int64_t width = Vec<A>::width;
  int64_t i = 0;
  for (; i + width <= features; i += width) body(i, width);
  if (i < features) body(i, features - i);
}

// The normalized values are (x * unit - guess - rest) * scale, where 1 / unit is a power of two, and mean and scale are those of
// x * unit. It is 1 but for values whose squares are too large or too small to be summed. The mean is a sum of two, since rounded
// to one it would be wrong by more than small differences from it are: a value near the guess minus that is exact.
template <class A>
struct Moments {
  A unit, guess, rest, scale;  // scale: 1 / sqrt(variance + eps)
  A scale_of_x;                // the same of x in its own unit
  bool exact;                  // whether the squares could be summed

  AI3_INLINE Vec<A> centered(Vec<A> v) const { return fma(v, Vec<A>(unit), Vec<A>(-guess)) - Vec<A>(rest); }
  AI3_INLINE Vec<A> normal(Vec<A> v) const { return centered(v) * Vec<A>(scale); }
};
// From the mean of the differences from `guess`, and of their squares.
template <class A>
AI3_INLINE Moments<A> moments_around(A unit, A guess, double off, double squares, double eps) {
  constexpr double kLeast = sizeof(A) == 4 ? 1e-30 : 1e-290;  // below it the type lacks some of the squares' bits
  const double u = static_cast<double>(unit), variance = squares - off * off;
  const double spread = (variance < 0 ? 0 : variance) + eps * u * u, scale = 1 / __builtin_sqrt(spread);
  return {unit,
          guess,
          static_cast<A>(off),
          static_cast<A>(scale),
          static_cast<A>(u * scale),
          squares < __builtin_inf() && spread >= kLeast};
}

// The unit in which the largest of some values is about 1, or as near to it as the type has units; 1 for zeros, or where one is
// not finite. each(f) calls f with each value.
template <class A, class Each>
AI3_INLINE A unit_of(const Each& each) {
  constexpr int kMost = sizeof(A) == 4 ? 126 : 1022;
  A largest = 0;
  bool finite = true;
  each([&](A v) {
    const A size = v < 0 ? -v : v;
    finite = finite && size < static_cast<A>(__builtin_inf());
    if (size > largest) largest = size;
  });
  if (!finite || largest == 0) return 1;
  const int exponent = __builtin_ilogb(static_cast<double>(largest));
  return static_cast<A>(__builtin_ldexp(1, exponent > kMost ? -kMost : exponent < -kMost ? kMost : -exponent));
}
// Of values whose squares could not be summed, in such a unit. One large value all over has no variance, and in its unit eps is
// less than the type can divide by, or nothing. Of other values scale is far below this, of which a few times are finite, too.
template <class A>
AI3_INLINE Moments<A> bounded(Moments<A> m, double eps) {
  constexpr A kMost = static_cast<A>(sizeof(A) == 4 ? 1e30 : 1e290);
  if (eps > 0 && m.scale > kMost) m.scale = kMost;
  const A most_of_x = static_cast<A>(1 / __builtin_sqrt(eps));
  if (m.scale_of_x > most_of_x) m.scale_of_x = most_of_x;
  return m;
}

}  // namespace ai3::inline AI3_LEVEL

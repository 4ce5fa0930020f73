// Winograd's minimal filtering F(MxM, 3x3) (Lavin & Gray 2015): an M x M tile of outputs from (M+2)^2 products a channel pair
// instead of 9 M^2. In one dimension, y = A^T [(G g) . (B^T d)]: by the transposition principle it is the Toom-Cook product of
// polynomials, evaluated at the points 0, +-p_1, +-p_2, ... and infinity. With N(x) = x (x^2 - p_1^2) (x^2 - p_2^2) ...,
//   B^T: the coefficients of N(x) / (x - p), and of N(x) for infinity;
//   G:   (1, p, p^2) / N'(p), and (0, 0, 1);
//   A^T: p^i in row i; infinity only in the last.
// The points decide the rounding error. They are chosen by measurement among pairs with few bits: for M = 4, +-3/4 and +-3/2 lose
// a fifth of what the usual +-1 and +-2 lose.
#pragma once
#include "backward.h"
#include "transform_domain.h"

namespace ai3::inline AI3_LEVEL {
namespace {

template <int M>
inline constexpr double kPoints[M / 2] = {1};
template <>
inline constexpr double kPoints<4>[2] = {.75, 1.5};
template <>
inline constexpr double kPoints<6>[3] = {.5625, 1, 1.75};

template <int M>
struct Winograd {
  static constexpr int kExtent = M + 2, kPositions = kExtent * kExtent, kMostTaps = 3, kPairs = M / 2;
  static constexpr double kForwardFlops = 2. * 2 * kExtent * (kPairs * (kPairs + 2) + 0. + kPairs * kPairs);
  static constexpr double kInverseFlops = 2. * (kExtent + M) * (2. * kPairs + M * kPairs);

  // Coefficients c[j] of x^(2j) in the product of (x^2 - p^2) over the pairs but `without`.
  struct Even {
    double c[kPairs + 1];
  };
  static constexpr Even product(int without) {
    Even e{{1}};
    for (int i = 0, degree = 0; i < kPairs; i++) {
      if (i == without) continue;
      const double square = kPoints<M>[i] * kPoints<M>[i];
      degree++;
      for (int j = degree; j >= 0; j--) e.c[j] = (j > 0 ? e.c[j - 1] : 0) - square * (j < degree ? e.c[j] : 0);
    }
    return e;
  }
  static constexpr double power(double x, int n) { return n == 0 ? 1 : x * power(x, n - 1); }
  // N'(p) at p = 0 (i < 0) and at both points of pair i.
  static constexpr double derivative(int i) {
    const double x = i < 0 ? 0 : kPoints<M>[i] * kPoints<M>[i];
    double value = i < 0 ? 1 : 2 * x;
    for (int j = 0; j < kPairs; j++)
      if (j != i) value *= x - kPoints<M>[j] * kPoints<M>[j];
    return value;
  }

  // The sum of c[j] d[2j] for j <= Degree, whose leading coefficient is 1.
  template <int Without, int Degree, class V>
  AI3_INLINE static V evaluate(const V* d) {
    V sum = d[2 * Degree];
#pragma GCC unroll 4
    for (int j = Degree - 1; j >= 0; j--) sum = fma(d[2 * j], static_cast<Scalar<V>>(kEven<Without>.c[j]), sum);
    return sum;
  }
  template <int Without>
  static constexpr Even kEven = product(Without);
  template <class V>
  using Scalar = decltype(V()[0]);

  // B^T d. Both points of a pair share their even and odd parts.
  template <class V, int i = 0>
  AI3_INLINE static void input(const V (&d)[kExtent], V (&out)[kExtent]) {
    if constexpr (i == 0) out[0] = evaluate<-1, kPairs>(d), out[kExtent - 1] = evaluate<-1, kPairs>(d + 1);
    if constexpr (i < kPairs) {
      const V even = evaluate<i, kPairs - 1>(d + 2), odd = evaluate<i, kPairs - 1>(d + 1);
      constexpr Scalar<V> point = static_cast<Scalar<V>>(kPoints<M>[i]);
      out[1 + 2 * i] = fma(odd, point, even), out[2 + 2 * i] = fnma(odd, point, even);
      input<V, i + 1>(d, out);
    }
  }
  // A^T m.
  template <class V>
  AI3_INLINE static void output(const V (&m)[kExtent], V (&out)[M]) {
    V sum[kPairs], difference[kPairs];
#pragma GCC unroll 8
    for (int i = 0; i < kPairs; i++) sum[i] = m[1 + 2 * i] + m[2 + 2 * i], difference[i] = m[1 + 2 * i] - m[2 + 2 * i];
    out[0] = m[0];
#pragma GCC unroll 8
    for (int i = 0; i < kPairs; i++) out[0] += sum[i];
#pragma GCC unroll 8
    for (int r = 1; r < M; r++) {
      const V* terms = r % 2 ? difference : sum;
      out[r] = r == M - 1 ? m[kExtent - 1] : V(Scalar<V>{0});
#pragma GCC unroll 8
      for (int i = 0; i < kPairs; i++) {
        const Scalar<V> factor = static_cast<Scalar<V>>(power(kPoints<M>[i], r));
        out[r] = r < M - 1 && i == 0 ? terms[i] * V(factor) : fma(terms[i], factor, out[r]);
      }
    }
  }
  // G g.
  AI3_INLINE static void kernel(const Vec<double> (&g)[3], Vec<double> (&out)[kExtent]) {
    out[0] = g[0] * Vec<double>(1 / derivative(-1)), out[kExtent - 1] = g[2];
    for (int i = 0; i < kPairs; i++) {
      const double point = kPoints<M>[i], scale = 1 / derivative(i);
      const Vec<double> even = fma(g[2], point * point, g[0]) * Vec<double>(scale), odd = g[1] * Vec<double>(point * scale);
      out[1 + 2 * i] = even + odd, out[2 + 2 * i] = even - odd;
    }
  }

  template <class In, class Out>
  AI3_INLINE static void forward(const In& in, const Out& out) {
    using V = decltype(in(0, 0));
    V rows[kExtent][kExtent], line[kExtent], result[kExtent];
    for (int j = 0; j < kExtent; j++) {
#pragma GCC unroll 8
      for (int i = 0; i < kExtent; i++) line[i] = in(i, j);
      input(line, result);
#pragma GCC unroll 8
      for (int i = 0; i < kExtent; i++) rows[i][j] = result[i];
    }
    for (int i = 0; i < kExtent; i++) {
      input(rows[i], result);
#pragma GCC unroll 8
      for (int j = 0; j < kExtent; j++) out(i * kExtent + j, result[j]);
    }
  }
  template <class In, class Out>
  AI3_INLINE static void inverse(const In& in, const Out& out, int64_t, int64_t) {
    using V = decltype(in(0));
    V rows[M][kExtent], line[kExtent], result[M];
    for (int j = 0; j < kExtent; j++) {
#pragma GCC unroll 8
      for (int i = 0; i < kExtent; i++) line[i] = in(i * kExtent + j);
      output(line, result);
#pragma GCC unroll 8
      for (int i = 0; i < M; i++) rows[i][j] = result[i];
    }
    for (int i = 0; i < M; i++) {
      output(rows[i], result);
#pragma GCC unroll 8
      for (int j = 0; j < M; j++) out(i, j, result[j]);
    }
  }
  template <class In, class Out>
  AI3_INLINE static void weights(const In& in, const Out& out) {
    Vec<double> rows[kExtent][3], line[3], result[kExtent];
    for (int j = 0; j < 3; j++) {
      for (int i = 0; i < 3; i++) line[i] = in(i, j);
      kernel(line, result);
      for (int i = 0; i < kExtent; i++) rows[i][j] = result[i];
    }
    for (int i = 0; i < kExtent; i++) {
      kernel(rows[i], result);
      for (int j = 0; j < kExtent; j++) out(i * kExtent + j, result[j]);
    }
  }
};

inline bool winograd_supports(const Conv2dProblem& p, Reason& reason) {
  if (p.kernel_height == 3 && p.kernel_width == 3 && p.stride_h == 1 && p.stride_w == 1 && p.dilation_h == 1 && p.dilation_w == 1)
    return true;
  return refuse(
      reason,
      "needs a 3x3 kernel with stride 1 and dilation 1, got kernel (%lld, %lld), stride (%lld, %lld), dilation (%lld, %lld)",
      static_cast<long long>(p.kernel_height), static_cast<long long>(p.kernel_width), static_cast<long long>(p.stride_h),
      static_cast<long long>(p.stride_w), static_cast<long long>(p.dilation_h), static_cast<long long>(p.dilation_w));
}

// dX is the transposed convolution of dY by the same method, unless its padding would be negative, or tiles are so few that their
// weights, which must be transformed for this one use, are not worth it.
template <int M>
GradientNames winograd_gradients(const Conv2dProblem& p, const char* name) {
  constexpr double kTransform = 60;  // a transformed weight takes about the time of this many operations
  const Conv2dProblem t = transposed(p);
  GradientNames names = by_patches(p);
  if (t.pad_h < 0 || t.pad_w < 0) return names;
  const double weights = static_cast<double>(transform_domain_packed_bytes<Winograd<M>>(t)) / (p.dtype == DType::f64 ? 8 : 4);
  const double products = 2 * 9 * static_cast<double>(p.batch * p.out_height * p.out_width) *
                          static_cast<double>(p.out_channels) * static_cast<double>(p.in_channels / p.groups);
  if (transform_domain_cost<Winograd<M>>(t).flops + kTransform * weights < products) names.input = name;
  return names;
}

template <int M>
void winograd_backward(const Conv2dProblem& p, const GradientBuffers& m, Workspace& workspace) {
  const Conv2dProblem t = transposed(p);
  with_type(p.dtype, [&]<class T>() {
    const TransformDomain<Winograd<M>, T> domain(t);
    Acc<T>* packed = workspace.take<Acc<T>>(domain.packed_elements());
    domain.pack(static_cast<const T*>(m.weight), packed, true);
    domain.run({m.grad_output, packed, nullptr, nullptr, m.grad_input}, workspace);
  });
}
template <int M>
int64_t winograd_backward_workspace(const Conv2dProblem& p, const GradientBuffers&) {
  const Conv2dProblem t = transposed(p);
  return checked_add(workspace_bytes<char>(transform_domain_packed_bytes<Winograd<M>>(t)),
                     transform_domain_workspace<Winograd<M>>(t));
}

#define AI3_WINOGRAD_TRAITS(M)                                                                            \
  .supports = winograd_supports, .workspace = transform_domain_workspace<Winograd<M>>,                    \
  .cost = transform_domain_cost<Winograd<M>>, .packed_bytes = transform_domain_packed_bytes<Winograd<M>>, \
  .pack = transform_domain_pack<Winograd<M>>,                                                             \
  .gradients = [](const Conv2dProblem& p) { return winograd_gradients<M>(p, "winograd_f" #M); },          \
  .backward = winograd_backward<M>, .backward_workspace = winograd_backward_workspace<M>

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

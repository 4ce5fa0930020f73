// Winograd's minimal filtering F(M_h x M_w, R_h x R_w) (Winograd 1980, Lavin & Gray 2015): a tile of M_h x M_w outputs from
// (M_h + R_h - 1) (M_w + R_w - 1) products a channel pair instead of M_h M_w R_h R_w. In one dimension, y = A^T [(G g) . (B^T
// d)]: by the transposition principle it is the Toom-Cook product of polynomials, evaluated at the points 0, +-p_1, +-p_2, ...
// and infinity. With N(x) = x (x^2 - p_1^2) (x^2 - p_2^2) ...,
//   B^T: the coefficients of N(x) / (x - p), and of N(x) for infinity;
//   G:   (1, p, p^2, ...) / N'(p), and (0, ..., 0, 1);
//   A^T: p^i in row i; infinity only in the last.
// F(2, 3) has the points 0, +-1 and infinity, N = x^3 - x, and rows of B^T are the coefficients, ascending, of
//   0: x^2 - 1 -> (-1, 0, 1, 0);   1: x^2 + x -> (0, 1, 1, 0);   -1: x^2 - x -> (0, -1, 1, 0);   infinity: N -> (0, -1, 0, 1).
// The points decide the rounding error. They are chosen by measurement among pairs with few bits: for two pairs, +-3/4 and +-3/2
// lose a fifth of what the usual +-1 and +-2 lose.
#pragma once
#include "backward.h"
#include "problem.h"
#include "transform_domain.h"

namespace ai3::inline AI3_LEVEL {
namespace {

template <int Pairs>
inline constexpr double kPoints[Pairs < 1 ? 1 : Pairs] = {1};
template <>
inline constexpr double kPoints<2>[2] = {.75, 1.5};
template <>
inline constexpr double kPoints<3>[3] = {.5625, 1, 1.75};
template <>
inline constexpr double kPoints<4>[4] = {.5, .875, 1.125, 2.5};

// F(M, R). M + R is odd; F(1, 1) is the identity, for the axis that a one-dimensional kernel does not have. Rows come in pairs:
// pair 0 is 0 and infinity, pair i the points +-kPoints[i - 1], which share work; leaving out point -1 of kPoints leaves out
// none.
template <int M, int R>
struct ToomCook {
  static constexpr int kOutputs = M, kTaps = R, kExtent = M + R - 1, kPairs = (kExtent - 2) / 2;
  static_assert(kExtent == 2 * kPairs + 2 || kExtent == 1);
  static constexpr double kInputFlops = 4. * kPairs * (kPairs + 1), kOutputFlops = 2. * kPairs * (2 + M);

  // Coefficients c[j] of x^(2j) in the product of (x^2 - p^2) over the pairs but `without`.
  struct Even {
    double c[kPairs + 1];
  };
  static constexpr Even product(int without) {
    Even e{{1}};
    for (int i = 0, degree = 0; i < kPairs; i++) {
      if (i == without) continue;
      const double square = kPoints<kPairs>[i] * kPoints<kPairs>[i];
      degree++;
      for (int j = degree; j >= 0; j--) e.c[j] = (j > 0 ? e.c[j - 1] : 0) - square * (j < degree ? e.c[j] : 0);
    }
    return e;
  }
  static constexpr double power(double x, int n) { return n == 0 ? 1 : x * power(x, n - 1); }
  // N'(p) at p = 0 (i < 0) and at both points of pair i.
  static constexpr double derivative(int i) {
    const double x = i < 0 ? 0 : kPoints<kPairs>[i] * kPoints<kPairs>[i];
    double value = i < 0 ? 1 : 2 * x;
    for (int j = 0; j < kPairs; j++)
      if (j != i) value *= x - kPoints<kPairs>[j] * kPoints<kPairs>[j];
    return value;
  }

  template <int Without>
  static constexpr Even kEven = product(Without);
  template <class V>
  using Scalar = decltype(V()[0]);

  // The sum of c[j] d[2j] for j <= Degree, whose leading coefficient is 1.
  template <int Without, int Degree, class V>
  AI3_INLINE static V evaluate(const V* d) {
    V sum = d[2 * Degree];
#pragma GCC unroll 4
    for (int j = Degree - 1; j >= 0; j--) sum = fma(d[2 * j], static_cast<Scalar<V>>(kEven<Without>.c[j]), sum);
    return sum;
  }
  // Two rows of B^T d: of 0 and infinity (pair 0), or of both points of a pair, which share their even and odd parts.
  template <int pair, class V>
  AI3_INLINE static void input(const V (&d)[kExtent], V& first, V& second) {
    if constexpr (pair == 0) {
      first = evaluate<-1, kPairs>(d), second = evaluate<-1, kPairs>(d + (kExtent > 1));
    } else {
      const V even = evaluate<pair - 1, kPairs - 1>(d + 2), odd = evaluate<pair - 1, kPairs - 1>(d + 1);
      constexpr Scalar<V> point = static_cast<Scalar<V>>(kPoints<kPairs>[pair - 1]);
      first = fma(odd, point, even), second = fnma(odd, point, even);
    }
  }
  // Where input<pair> goes.
  static constexpr int first(int pair) { return pair == 0 ? 0 : 2 * pair - 1; }
  static constexpr int second(int pair) { return pair == 0 ? kExtent - 1 : 2 * pair; }
  // B^T d.
  template <class V, int pair = 0>
  AI3_INLINE static void input(const V (&d)[kExtent], V (&out)[kExtent]) {
    input<pair>(d, out[first(pair)], out[second(pair)]);
    if constexpr (pair < kPairs) input<V, pair + 1>(d, out);
  }
  // The first N rows of A^T, with infinity in the last of them, times m.
  template <class V, int N>
  AI3_INLINE static void output(const V (&m)[kExtent], V (&out)[N]) {
    V sum[kPairs + 1], difference[kPairs + 1];
#pragma GCC unroll 8
    for (int i = 0; i < kPairs; i++) sum[i] = m[1 + 2 * i] + m[2 + 2 * i], difference[i] = m[1 + 2 * i] - m[2 + 2 * i];
    out[0] = m[0];
#pragma GCC unroll 8
    for (int i = 0; i < kPairs; i++) out[0] += sum[i];
#pragma GCC unroll 8
    for (int r = 1; r < N; r++) {
      const V* terms = r % 2 ? difference : sum;
      out[r] = r == N - 1 ? m[kExtent - 1] : V(Scalar<V>{0});
#pragma GCC unroll 8
      for (int i = 0; i < kPairs; i++) {
        const Scalar<V> factor = static_cast<Scalar<V>>(power(kPoints<kPairs>[i], r));
        out[r] = r < N - 1 && i == 0 ? terms[i] * V(factor) : fma(terms[i], factor, out[r]);
      }
    }
  }
  // Its transpose: the values at all points of the polynomial whose coefficients are g. A y, for y of M.
  template <class V, int N>
  AI3_INLINE static void values(const V (&g)[N], V (&out)[kExtent]) {
    out[0] = g[0], out[kExtent - 1] = g[N - 1];
#pragma GCC unroll 8
    for (int i = 0; i < kPairs; i++) {
      const double point = kPoints<kPairs>[i];
      V part[2] = {g[0], V(Scalar<V>{0})};  // even powers and odd
#pragma GCC unroll 8
      for (int j = 1; j < N; j++) part[j % 2] = fma(g[j], static_cast<Scalar<V>>(power(point, j)), part[j % 2]);
      out[1 + 2 * i] = part[0] + part[1], out[2 + 2 * i] = part[0] - part[1];
    }
  }
  // Times 1 / N'(p), which makes values G g, and output, for N = R, its transpose G^T u.
  template <class V>
  AI3_INLINE static void scale(V (&v)[kExtent]) {
    if constexpr (kExtent > 1) {
      v[0] = v[0] * V(static_cast<Scalar<V>>(1 / derivative(-1)));
#pragma GCC unroll 16
      for (int i = 1; i < kExtent - 1; i++) v[i] = v[i] * V(static_cast<Scalar<V>>(1 / derivative((i - 1) / 2)));
    }
  }
};

// F(M_h, R_h) on columns, nested with F(M_w, R_w) on rows.
template <class H, class W>
struct Nested {
  static constexpr int kExtentH = H::kExtent, kExtentW = W::kExtent, kPositions = kExtentH * kExtentW, kMostTapsH = H::kTaps,
                       kMostTapsW = W::kTaps, kOutputsH = H::kOutputs, kOutputsW = W::kOutputs, kTaps = H::kTaps * W::kTaps;
  static_assert(kExtentH <= 15 && kExtentW <= 15);  // what Apart (core/lanes.h) can address
  static constexpr double kForwardFlops = kExtentW * H::kInputFlops + kExtentH * W::kInputFlops,
                          kInverseFlops = kExtentW * H::kOutputFlops + H::kOutputs * W::kOutputFlops;

  // Two rows at a time, from inputs that are loaded again for each: a whole tile is larger than the register file, and what is
  // spilled comes back only after it has passed the store queue.
  template <int pair = 0, class In, class Out>
  AI3_INLINE static void forward(const In& in, const Out& out) {
    auto column = columns_of(in);
    using V = decltype(column[0]);
    V line[kExtentH], first[kExtentW], second[kExtentW], result[kExtentW];
#pragma GCC unroll 16
    for (int j = 0; j < kExtentW; j++, column.advance()) {
#pragma GCC unroll 16
      for (int i = 0; i < kExtentH; i++) line[i] = column[i];
      H::template input<pair>(line, first[j], second[j]);
    }
    auto put = [&](int row) {
      const auto to = row_of(out, row * kExtentW);
#pragma GCC unroll 16
      for (int j = 0; j < kExtentW; j++) to.put(j, result[j]);
    };
    W::input(first, result), put(H::first(pair));
    if constexpr (kExtentH > 1) W::input(second, result), put(H::second(pair));
    if constexpr (pair < H::kPairs) forward<pair + 1>(in, out);
  }
  template <class In, class Out>
  AI3_INLINE static void inverse(const In& in, const Out& out, int64_t, int64_t) {
    auto from = in.columns(kExtentW);
    using V = decltype(from[0]);
    V rows[H::kOutputs][kExtentW], line[kExtentH], column[H::kOutputs], result[W::kOutputs];
#pragma GCC unroll 16
    for (int j = 0; j < kExtentW; j++, from.advance()) {
#pragma GCC unroll 16
      for (int i = 0; i < kExtentH; i++) line[i] = from[i];
      H::output(line, column);
#pragma GCC unroll 8
      for (int i = 0; i < H::kOutputs; i++) rows[i][j] = column[i];
    }
#pragma GCC unroll 8
    for (int i = 0; i < H::kOutputs; i++) {
      W::output(rows[i], result);
      if constexpr (requires { out.row(i); }) {
        const auto to = out.row(i);
#pragma GCC unroll 8
        for (int j = 0; j < W::kOutputs; j++) to.put(j, result[j]);
      } else {
        for (int j = 0; j < W::kOutputs; j++) out(i, j, result[j]);
      }
    }
  }
  template <class In, class Out>
  AI3_INLINE static void weights(const In& in, const Out& out) {
    using D = Vec<double>;
    D rows[kExtentH][W::kTaps], line[H::kTaps], column[kExtentH], result[kExtentW];
    for (int j = 0; j < W::kTaps; j++) {
      for (int i = 0; i < H::kTaps; i++) line[i] = in(i, j);
      H::values(line, column), H::scale(column);
      for (int i = 0; i < kExtentH; i++) rows[i][j] = column[i];
    }
    for (int i = 0; i < kExtentH; i++) {
      W::values(rows[i], result), W::scale(result);
      for (int j = 0; j < kExtentW; j++) out(i * kExtentW + j, result[j]);
    }
  }
  // The transposes of inverse and weights, for the gradient of the weights: A y A^T of a tile of outputs, and G^T u G.
  template <class V, class Out>
  AI3_INLINE static void spread(const V (&y)[H::kOutputs][W::kOutputs], const Out& out) {
    V rows[kExtentH][W::kOutputs], line[H::kOutputs], column[kExtentH], result[kExtentW];
    for (int j = 0; j < W::kOutputs; j++) {
#pragma GCC unroll 8
      for (int i = 0; i < H::kOutputs; i++) line[i] = y[i][j];
      H::values(line, column);
#pragma GCC unroll 16
      for (int i = 0; i < kExtentH; i++) rows[i][j] = column[i];
    }
    for (int i = 0; i < kExtentH; i++) {
      W::values(rows[i], result);
      const auto to = out.row(i * kExtentW);
#pragma GCC unroll 16
      for (int j = 0; j < kExtentW; j++) to.put(j, result[j]);
    }
  }
  template <class In, class Out>
  AI3_INLINE static void gather(const In& in, const Out& out) {
    auto from = in.columns(kExtentW);
    using V = decltype(from[0]);
    V rows[H::kTaps][kExtentW], line[kExtentH], column[H::kTaps], result[W::kTaps];
    for (int j = 0; j < kExtentW; j++, from.advance()) {
#pragma GCC unroll 16
      for (int i = 0; i < kExtentH; i++) line[i] = from[i];
      H::scale(line), H::output(line, column);
#pragma GCC unroll 8
      for (int i = 0; i < H::kTaps; i++) rows[i][j] = column[i];
    }
    for (int i = 0; i < H::kTaps; i++) {
      W::scale(rows[i]), W::output(rows[i], result);
#pragma GCC unroll 8
      for (int j = 0; j < W::kTaps; j++) out(i * W::kTaps + j, result[j]);
    }
  }
};
// F(MxM, 3x3).
template <int M>
using Winograd = Nested<ToomCook<M, 3>, ToomCook<M, 3>>;

// A size is what it must be, or not known yet.
AI3_INLINE bool may_be(int64_t size, int64_t wanted) { return size == wanted || size < 0; }
inline bool winograd_steps(const Conv2dProblem& p, const char* kernels, bool kernel, Reason& reason) {
  if (kernel && may_be(p.stride_h, 1) && may_be(p.stride_w, 1) && may_be(p.dilation_h, 1) && may_be(p.dilation_w, 1)) return true;
  return refuse(
      reason,
      "needs a %s kernel with stride 1 and dilation 1, got kernel (%lld, %lld), stride (%lld, %lld), dilation (%lld, %lld)",
      kernels, static_cast<long long>(p.kernel_height), static_cast<long long>(p.kernel_width),
      static_cast<long long>(p.stride_h), static_cast<long long>(p.stride_w), static_cast<long long>(p.dilation_h),
      static_cast<long long>(p.dilation_w));
}
inline bool winograd_supports(const Conv2dProblem& p, Reason& reason) {
  return winograd_steps(p, "3x3", may_be(p.kernel_height, 3) && may_be(p.kernel_width, 3), reason);
}
// Every kernel size that some form takes.
inline bool winograd_supports_any(const Conv2dProblem& p, Reason& reason) {
  constexpr int64_t kernels[][2] = {{3, 3}, {5, 5}, {1, 3}, {3, 1}, {1, 7}, {7, 1}};
  bool known = false;
  for (const auto& size : kernels) known |= may_be(p.kernel_height, size[0]) && may_be(p.kernel_width, size[1]);
  return winograd_steps(p, "3x3, 5x5, 1x3, 3x1, 1x7 or 7x1", known, reason);
}

#define AI3_WINOGRAD_TRAITS(...)                                                                                      \
  .epilogue = true, .supports = winograd_supports, .workspace = TransformDomainTraits<__VA_ARGS__>::workspace,        \
  .cost = TransformDomainTraits<__VA_ARGS__>::cost, .packed_bytes = TransformDomainTraits<__VA_ARGS__>::packed_bytes, \
  .pack = TransformDomainTraits<__VA_ARGS__>::pack

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

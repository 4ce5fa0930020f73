// The discrete Fourier transform of F complex points, F a power of two: Stockham's self-sorting form (Cochran et al. 1967) with
// radix-4 steps and one radix-2 step where F is no power of four. Each lane of a vector is a transform of its own.
#pragma once
#include "simd.h"

namespace ai3::inline AI3_LEVEL {

template <class A>
struct Complex {
  Vec<A> re, im;
  AI3_INLINE friend Complex operator+(Complex a, Complex b) { return {a.re + b.re, a.im + b.im}; }
  AI3_INLINE friend Complex operator-(Complex a, Complex b) { return {a.re - b.re, a.im - b.im}; }
};
// a + i*b and a - i*b
template <class A>
AI3_INLINE Complex<A> plus_i(Complex<A> a, Complex<A> b) {
  return {a.re - b.im, a.im + b.re};
}
template <class A>
AI3_INLINE Complex<A> minus_i(Complex<A> a, Complex<A> b) {
  return {a.re + b.im, a.im - b.re};
}

// cos and sin of 2 pi k / F, from their Taylor series in extended precision, rounded once.
template <int F, class A>
struct Twiddles {
  A cosine[F], sine[F];
  constexpr Twiddles() : cosine{}, sine{} {
    for (int k = 0; k < F; k++) {
      // |angle| <= pi; 40 terms leave less than 1e-25.
      const long double angle = 6.28318530717958647692528676655900577L * (2 * k <= F ? k : k - F) / F;
      long double term = 1, sum[2] = {0, 0};
      for (int i = 0; i < 40; i++) {
        sum[i % 2] += i / 2 % 2 ? -term : term;
        term = term * angle / (i + 1);
      }
      cosine[k] = static_cast<A>(sum[0]), sine[k] = static_cast<A>(sum[1]);
    }
  }
};
template <int F, class A>
inline constexpr Twiddles<F, A> kTwiddles{};

// e^(-2 pi i k / F) * a, or the conjugate factor in the inverse transform.
template <int F, bool inverse, class A>
AI3_INLINE Complex<A> twiddle(Complex<A> a, int k) {
  if (k == 0) return a;
  const A c = kTwiddles<F, A>.cosine[k], s = inverse ? -kTwiddles<F, A>.sine[k] : kTwiddles<F, A>.sine[k];
  return {fma(a.re, c, a.im * Vec<A>(s)), fnma(a.re, s, a.im * Vec<A>(c))};
}

// Transforms x (not scaled), using y as scratch; returns which of the two holds the result.
template <int F, bool inverse, class A>
Complex<A>* fft(Complex<A>* x, Complex<A>* y) {
  static_assert(F >= 2 && (F & (F - 1)) == 0);
  int n = F, s = 1;
  for (; n >= 4; n /= 4, s *= 4) {
    const int m = n / 4;
    for (int p = 0; p < m; p++)
      for (int q = 0; q < s; q++) {
        const Complex<A>* in = x + q + s * p;
        Complex<A>* out = y + q + s * 4 * p;
        const Complex<A> a = in[0], b = in[s * m], c = in[s * 2 * m], d = in[s * 3 * m];
        const Complex<A> even = a + c, odd = a - c, sum = b + d, difference = inverse ? d - b : b - d;
        out[0] = even + sum;
        out[s] = twiddle<F, inverse>(minus_i(odd, difference), s * p);
        out[s * 2] = twiddle<F, inverse>(even - sum, s * 2 * p);
        out[s * 3] = twiddle<F, inverse>(plus_i(odd, difference), s * 3 * p);
      }
    Complex<A>* t = x;
    x = y, y = t;
  }
  if (n == 2) {
    for (int q = 0; q < s; q++) {
      const Complex<A> a = x[q], b = x[q + s];
      y[q] = a + b, y[q + s] = a - b;
    }
    return y;
  }
  return x;
}

}  // namespace ai3::inline AI3_LEVEL

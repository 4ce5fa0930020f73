// Convolution by FFT, for every kernel: overlapping square tiles of the input are transformed and multiplied with the conjugate
// spectrum of the kernel, which is correlation; the outputs that did not wrap around are kept (overlap-save; Mathieu et al. 2014,
// Vasilache et al. 2015). Tiles of fixed size, not the image's, keep the spectra of the weights the same for every image.
//
// - Real data: only F/2 + 1 columns of a spectrum are kept, and two rows go through one complex transform.
// - Complex products over the channels are three real matrix products (Gauss; "Gauss-FFT" in Zlateski et al. 2018):
//   (a + ib)(c + id) = (c(a+b) - b(c+d)) + i(c(a+b) + a(d-c)).
// - Strides, dilations and kernels of more than F/2 taps: transform_domain.h.
#include "../core/fft.h"

#include "backward.h"
#include "delegated.h"
#include "problem.h"
#include "transform_domain.h"

namespace ai3::inline AI3_LEVEL {
namespace {

// The three factors of a complex product (Gauss) of the input's spectrum and the weights', which is scaled and conjugate, and
// the product of them.
template <class Z, class Out>
AI3_INLINE void put_factors(int64_t position, const Z& z, const Out& out) {
  out(position, z.re + z.im), out(position + 1, z.re), out(position + 2, z.im);
}
template <class Z, class Out>
AI3_INLINE void put_weight_factors(int64_t position, const Z& z, Vec<double> scale, const Out& out) {
  const auto c = z.re * scale, d = Vec<double>(0.) - z.im * scale;
  out(position, c), out(position + 1, d - c), out(position + 2, c + d);
}
template <class In>
AI3_INLINE auto product_of(int64_t position, const In& in) {
  const auto common = in(position);
  return Complex<decltype(in(0)[0])>{common - in(position + 2), common + in(position + 1)};
}

template <int F>
struct Fourier {
  static constexpr int kColumns = F / 2 + 1, kExtentH = F, kExtentW = F, kMostTapsH = F / 2, kMostTapsW = F / 2,
                       kPositions = 3 * F * kColumns;
  static constexpr double kForwardFlops = 5. * F * (F / 2 + kColumns) * __builtin_ctz(F), kInverseFlops = kForwardFlops;

  // put(k, Z_k) for the columns of the spectrum of in(i, j), times 2.
  template <class In, class Put>
  AI3_INLINE static void spectrum(const In& in, const Put& put) {
    using Z = Complex<decltype(in(0, 0)[0])>;
    Z half[F][kColumns], line[F], spare[F];
    for (int i = 0; i < F; i += 2) {
      for (int j = 0; j < F; j++) line[j] = {in(i, j), in(i + 1, j)};
      const Z* both = fft<F, false>(line, spare);
      for (int k = 0; k < kColumns; k++) {
        const Z z = both[k], mirrored = both[(F - k) % F];
        half[i][k] = {z.re + mirrored.re, z.im - mirrored.im};
        half[i + 1][k] = {z.im + mirrored.im, mirrored.re - z.re};
      }
    }
    for (int k = 0; k < kColumns; k++) {
      for (int i = 0; i < F; i++) line[i] = half[i][k];
      const Z* column = fft<F, false>(line, spare);
      for (int i = 0; i < F; i++) put(3 * (k * F + i), column[i]);
    }
  }
  template <class In, class Out>
  [[gnu::noinline]] static void forward(const In& in, const Out& out) {
    spectrum(in, [&](int64_t position, const auto& z) { put_factors(position, z, out); });
  }
  template <class In, class Out>
  [[gnu::noinline]] static void weights(const In& in, const Out& out) {
    const Vec<double> scale = 1. / (4. * F * F);  // of both spectra and the inverse transform
    spectrum(in, [&](int64_t position, const auto& z) { put_weight_factors(position, z, scale, out); });
  }
  template <class In, class Out>
  [[gnu::noinline]] static void inverse(const In& in, const Out& out, int64_t rows, int64_t columns) {
    using Z = Complex<decltype(in(0)[0])>;
    Z half[F][kColumns], line[F], spare[F];
    for (int k = 0; k < kColumns; k++) {
      for (int i = 0; i < F; i++) line[i] = product_of(3 * (k * F + i), in);
      const Z* column = fft<F, true>(line, spare);
      for (int i = 0; i < rows + 1 && i < F; i++) half[i][k] = column[i];
    }
    for (int i = 0; i < rows; i += 2) {
      for (int k = 0; k < kColumns; k++) {
        const Z a = half[i][k], b = half[i + 1][k];
        line[k] = plus_i(a, b);
        if (k > 0 && k < F / 2) line[F - k] = {a.re + b.im, b.re - a.im};
      }
      const Z* both = fft<F, true>(line, spare);
      for (int j = 0; j < columns; j++) {
        out(i, j, both[j].re);
        if (i + 1 < rows) out(i + 1, j, both[j].im);
      }
    }
  }
};

// Of kernels of height 1, such as conv1d's: tiles in one dimension. A real line of F points is a complex one of F / 2, even
// points beside odd ones, whose spectrum of F / 2 + 1 numbers is untangled after the transform and tangled before the inverse
// (Cooley, Lewis & Welch 1970).
template <int F>
struct FourierLine {
  static constexpr int kHalf = F / 2, kExtentH = 1, kExtentW = F, kMostTapsH = 1, kMostTapsW = F / 2,
                       kPositions = 3 * (kHalf + 1);
  static constexpr double kForwardFlops = 2.5 * F * __builtin_ctz(kHalf) + 5. * F, kInverseFlops = kForwardFlops;

  // put(k, X_k) of the spectrum of in(0, j), times 2: X_k = (Z_k + conj Z_-k) - i e^(-2 pi i k / F) (Z_k - conj Z_-k).
  template <class In, class Put>
  AI3_INLINE static void spectrum(const In& in, const Put& put) {
    using Z = Complex<decltype(in(0, 0)[0])>;
    Z line[kHalf], spare[kHalf];
    for (int j = 0; j < kHalf; j++) line[j] = {in(0, 2 * j), in(0, 2 * j + 1)};
    const Z* z = fft<kHalf, false>(line, spare);
    for (int k = 0; k <= kHalf; k++) {
      const Z a = z[k % kHalf], b = z[(kHalf - k) % kHalf];
      put(3 * k, minus_i(Z{a.re + b.re, a.im - b.im}, twiddle<F, false>(Z{a.re - b.re, a.im + b.im}, k)));
    }
  }
  template <class In, class Out>
  [[gnu::noinline]] static void forward(const In& in, const Out& out) {
    spectrum(in, [&](int64_t position, const auto& z) { put_factors(position, z, out); });
  }
  template <class In, class Out>
  [[gnu::noinline]] static void weights(const In& in, const Out& out) {
    const Vec<double> scale = 1. / (4. * F);  // of both spectra and the inverse transform
    spectrum(in, [&](int64_t position, const auto& z) { put_weight_factors(position, z, scale, out); });
  }
  template <class In, class Out>
  [[gnu::noinline]] static void inverse(const In& in, const Out& out, int64_t rows, int64_t columns) {
    if (rows < 1) return;  // a tile of a sublattice of rows that has none left
    using Z = Complex<decltype(in(0)[0])>;
    Z x[kHalf + 1], line[kHalf], spare[kHalf];
    for (int k = 0; k <= kHalf; k++) x[k] = product_of(3 * k, in);
    for (int k = 0; k < kHalf; k++) {
      const Z a = x[k], b = x[kHalf - k];
      line[k] = plus_i(Z{a.re + b.re, a.im - b.im}, twiddle<F, true>(Z{a.re - b.re, a.im + b.im}, k));
    }
    const Z* both = fft<kHalf, true>(line, spare);
    for (int j = 0; j < columns; j += 2) {
      out(0, j, both[j / 2].re);
      if (j + 1 < columns) out(0, j + 1, both[j / 2].im);
    }
  }
};

// The tile: the least of 16, 32 and 64 inputs that takes a kernel into its half; of 32, 64, 128 and 256 in one dimension.
struct TileForKernel {
  template <class Body>
  AI3_INLINE static auto with(const Conv2dProblem& p, const Body& body) {
    if (p.kernel_height == 1) {
      auto fits = [&](int64_t extent) {
        const Axis w(1, 1, p.kernel_width, p.stride_w, 0, p.dilation_w, extent, extent / 2);
        return w.branches == w.residues;
      };
      if (fits(32)) return body.template operator()<FourierLine<32>>();
      if (fits(64)) return body.template operator()<FourierLine<64>>();
      if (fits(128)) return body.template operator()<FourierLine<128>>();
      return body.template operator()<FourierLine<256>>();
    }
    auto fits = [&](int64_t extent, int64_t most_taps) {
      const Axis h(1, 1, p.kernel_height, p.stride_h, 0, p.dilation_h, extent, most_taps);
      const Axis w(1, 1, p.kernel_width, p.stride_w, 0, p.dilation_w, extent, most_taps);
      return h.branches == h.residues && w.branches == w.residues;
    };
    if (fits(16, 8)) return body.template operator()<Fourier<16>>();
    if (fits(32, 16)) return body.template operator()<Fourier<32>>();
    return body.template operator()<Fourier<64>>();
  }
};
using Tiles = ChosenTransformTraits<TileForKernel>;

template <class T>
void conv2d_fft(const Conv2dProblem& p, const Conv2dOperands& buffers, Workspace& workspace) {
  Tiles::run<T>(p, buffers, workspace);
}

AI3_ALGORITHM(conv2d, fft, .accuracy = Accuracy::bounded, .error_bound = 5e-6, .epilogue = true, .workspace = Tiles::workspace,
              .cost = Tiles::cost, .packed_bytes = Tiles::packed_bytes, .pack = Tiles::pack, .gradients = by_patches)

}  // namespace

const Algorithm<Conv2dProblem>& conv2d_fft_record() { return conv2d_fft_algorithm; }

}  // namespace ai3::inline AI3_LEVEL

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
#include "problem.h"
#include "transform_domain.h"

namespace ai3::inline AI3_LEVEL {
namespace {

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
    spectrum(in, [&](int64_t position, const auto& z) {
      out(position, z.re + z.im), out(position + 1, z.re), out(position + 2, z.im);
    });
  }
  template <class In, class Out>
  [[gnu::noinline]] static void weights(const In& in, const Out& out) {
    const Vec<double> scale = 1. / (4. * F * F);  // of both spectra and the inverse transform
    spectrum(in, [&](int64_t position, const auto& z) {
      const auto c = z.re * scale, d = Vec<double>(0.) - z.im * scale;
      out(position, c), out(position + 1, d - c), out(position + 2, c + d);
    });
  }
  template <class In, class Out>
  [[gnu::noinline]] static void inverse(const In& in, const Out& out, int64_t rows, int64_t columns) {
    using Z = Complex<decltype(in(0)[0])>;
    Z half[F][kColumns], line[F], spare[F];
    for (int k = 0; k < kColumns; k++) {
      for (int i = 0; i < F; i++) {
        const int64_t position = 3 * (k * F + i);
        const auto common = in(position);
        line[i] = {common - in(position + 2), common + in(position + 1)};
      }
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

// The tile: the least of 16, 32 and 64 inputs that takes a kernel into its half.
struct TileForKernel {
  template <class Body>
  AI3_INLINE static auto with(const Conv2dProblem& p, const Body& body) {
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
}  // namespace ai3::inline AI3_LEVEL

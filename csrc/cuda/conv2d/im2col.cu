// im2col + GEMM (Chellapilla et al. 2006): every patch becomes a row (NHWC) or column (NCHW) of a matrix in the workspace, and
// cuBLAS multiplies it with the weights. The batch goes through the workspace in chunks, so that it stays bounded.
#include "../core/cublas.cuh"

namespace ai3::inline AI3_LEVEL {
namespace {

constexpr int64_t kWorkspaceBytes = int64_t{256} << 20;

int64_t patch_elements(const Conv2dProblem& p) {  // of one image, all groups
  return checked_product({p.in_channels, p.kernel_height, p.kernel_width, p.out_height, p.out_width});
}
int64_t images_at_once(const Conv2dProblem& p) {
  const int64_t image = checked_mul(patch_elements(p), size_of(p.dtype)), fit = image > 0 ? kWorkspaceBytes / image : p.batch;
  return fit < 1 ? 1 : fit < p.batch ? fit : p.batch;
}
int64_t im2col_workspace(const Conv2dProblem& p) {
  return round_up(checked_product({images_at_once(p), patch_elements(p), size_of(p.dtype)}), 64);
}

template <class T>
void conv2d_im2col(const Conv2dProblem& p, const T* x, const T* w, const T* b, T* y, Workspace& workspace) {
  const int64_t channels = p.in_channels / p.groups, kernels = p.out_channels / p.groups;
  const int64_t taps = p.kernel_height * p.kernel_width, depth = channels * taps, pixels = p.out_height * p.out_width;
  const int64_t chunk = images_at_once(p);
  const bool channels_last = p.y_stride.c == 1;
  T* columns = workspace.take<T>(chunk * patch_elements(p));
  if (b)  // what the products are added onto, so that half types round once
    for_each(p.batch * p.out_channels * pixels, workspace, "conv2d_im2col",
             [=] __device__(int64_t i) { y[i] = b[channels_last ? i % p.out_channels : i / pixels % p.out_channels]; });
  for (int64_t n0 = 0; n0 < p.batch; n0 += chunk) {
    const int64_t images = p.batch - n0 < chunk ? p.batch - n0 : chunk;
    // NHWC: columns[g][n][pixel][depth]; NCHW: columns[g][n][depth][pixel].
    for_each(images * p.in_channels * taps * pixels, workspace, "conv2d_im2col", [=] __device__(int64_t i) {
      int64_t pixel, d, rest;
      if (channels_last)
        d = i % depth, rest = i / depth, pixel = rest % pixels, rest /= pixels;
      else
        pixel = i % pixels, rest = i / pixels, d = rest % depth, rest /= depth;
      const int64_t n = rest % images, c = rest / images * channels + d / taps, tap = d % taps;
      const int64_t h = pixel / p.out_width * p.stride_h - p.pad_h + tap / p.kernel_width * p.dilation_h;
      const int64_t v = pixel % p.out_width * p.stride_w - p.pad_w + tap % p.kernel_width * p.dilation_w;
      const bool inside = h >= 0 && h < p.in_height && v >= 0 && v < p.in_width;
      columns[i] = inside ? x[(n0 + n) * p.x_stride.n + c * p.x_stride.c + h * p.x_stride.h + v * p.x_stride.w] : T{};
    });
    for (int64_t g = 0; g < p.groups; g++) {
      const T* matrix = columns + g * images * pixels * depth;
      const T* weights = w + g * kernels * depth;
      T* out = y + n0 * p.y_stride.n + g * kernels * p.y_stride.c;
      if (channels_last)
        cublas_gemm(p.dtype, p.allow_tf32,
                    {images * pixels, kernels, depth, matrix, depth, 0, false, weights, depth, 0, true, out, p.out_channels, 0, 1,
                     b != nullptr});
      else
        cublas_gemm(p.dtype, p.allow_tf32,
                    {kernels, pixels, depth, weights, depth, 0, false, matrix, pixels, depth * pixels, false, out, pixels,
                     p.y_stride.n, images, b != nullptr});
    }
  }
}

AI3_ALGORITHM(conv2d, im2col, .workspace = im2col_workspace)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

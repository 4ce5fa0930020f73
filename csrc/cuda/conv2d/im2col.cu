// im2col + GEMM (Chellapilla et al. 2006): every patch becomes a row (NHWC) or column (NCHW) of a matrix in the workspace, and
// cuBLAS multiplies it with the weights. Images, or rows of one that is too large, go through the workspace in chunks, so that it
// stays bounded, but for the float32 sums of all outputs where a bias is added in 16 bits. A 1x1 kernel with stride 1 is a
// product already, and its input is multiplied where it lies.
#include "../../algos/conv2d/delegated.h"
#include "../core/cublas.cuh"
#include "../core/device.cuh"
#include "gradients.cuh"

namespace ai3::inline AI3_LEVEL {
namespace {

struct Chunk {
  int64_t images, rows;  // several images with all rows of the output, or some rows of one
};
int64_t row_elements(const Conv2dProblem& p) {  // of the patches of one row of the output, all groups
  return checked_product({p.in_channels, p.kernel_height, p.kernel_width, p.out_width});
}
Chunk chunk_of(const Conv2dProblem& p) {
  const int64_t row = checked_mul(row_elements(p), size_of(p.dtype)), image = checked_mul(row, p.out_height);
  if (image <= AI3_PATCH_BYTES) return {in_a_chunk(image, p.batch), p.out_height};
  return {1, in_a_chunk(row, p.out_height)};
}
// The matrices' sizes: of patches they are those of a chunk, but at least a row of the output.
bool im2col_supports(const Conv2dProblem& p, Reason& reason) {
  if (!device_supports(p, reason)) return false;
  const int64_t depth = checked_product({p.in_channels, p.kernel_height, p.kernel_width});
  if (!sizes_known(p)) return cublas_supports({p.in_channels, p.out_channels}, reason);
  const int64_t images = is_pointwise(p) && p.y_stride.c == 1 ? p.batch : 1;  // in one matrix, whatever there are
  return cublas_supports({depth, p.out_channels, checked_product({images, p.out_height, p.out_width}), p.batch}, reason);
}
// Whether the bias is added to float32 sums, which are rounded once: cuBLAS's products of 16 bits may be rounded before.
bool adds_apart(const Conv2dProblem& p) { return p.has_bias && size_of(p.dtype) == 2; }
int64_t outputs_of(const Conv2dProblem& p) { return checked_product({p.batch, p.out_channels, p.out_height, p.out_width}); }
int64_t im2col_workspace(const Conv2dProblem& p) {
  const int64_t bytes = checked_add(cublas_workspace(), adds_apart(p) ? piece_bytes<float>(outputs_of(p)) : 0);
  if (is_pointwise(p)) return bytes;
  const Chunk chunk = chunk_of(p);
  const int64_t patches = checked_product({chunk.images, chunk.rows, row_elements(p), size_of(p.dtype)});
  return checked_add(bytes, piece_bytes<char>(patches));
}

template <class T>
void conv2d_im2col(const Conv2dProblem& p, const T* x, const T* w, const T* b, T* y, Workspace& workspace) {
  const int64_t channels = p.in_channels / p.groups, kernels = p.out_channels / p.groups;
  const int64_t taps = p.kernel_height * p.kernel_width, depth = channels * taps, pixels = p.out_height * p.out_width;
  const bool channels_last = p.y_stride.c == 1, pointwise = is_pointwise(p);
  const Chunk chunk = pointwise ? Chunk{p.batch, p.out_height} : chunk_of(p);
  void* scratch = take<char>(workspace, cublas_workspace());
  T* columns = pointwise ? nullptr : take<T>(workspace, chunk.images * chunk.rows * row_elements(p));
  float* const sums = adds_apart(p) ? take<float>(workspace, outputs_of(p)) : nullptr;  // as y lies
  const bool add = b && !sums;
  if (add) spread_bias(p, b, y, workspace, "conv2d_im2col");
  for (int64_t n0 = 0; n0 < p.batch; n0 += chunk.images)
    for (int64_t h0 = 0; h0 < p.out_height; h0 += chunk.rows) {
      const int64_t images = p.batch - n0 < chunk.images ? p.batch - n0 : chunk.images;
      const int64_t rows = p.out_height - h0 < chunk.rows ? p.out_height - h0 : chunk.rows, taken = rows * p.out_width;
      // NHWC: columns[g][n][pixel][depth]; NCHW: columns[g][n][depth][pixel].
      if (!pointwise)
        for_each(images * p.in_channels * taps * taken, workspace, "conv2d_im2col", [=] __device__(int64_t i) {
          const Quotient inner = divided(i, channels_last ? depth : taken);
          const Quotient outer = divided(inner.quotient, channels_last ? taken : depth);
          const int64_t pixel = channels_last ? outer.rest : inner.rest, d = channels_last ? inner.rest : outer.rest;
          const Quotient image = divided(outer.quotient, images), channel = divided(d, taps);  // rest: the image, the tap
          const Quotient row = divided(pixel, p.out_width), tap = divided(channel.rest, p.kernel_width);
          const int64_t n = n0 + image.rest, c = image.quotient * channels + channel.quotient;
          const int64_t h = (h0 + row.quotient) * p.stride_h - p.pad_h + tap.quotient * p.dilation_h;
          const int64_t v = row.rest * p.stride_w - p.pad_w + tap.rest * p.dilation_w;
          const bool inside = h >= 0 && h < p.in_height && v >= 0 && v < p.in_width;
          columns[i] = inside ? x[n * p.x_stride.n + c * p.x_stride.c + h * p.x_stride.h + v * p.x_stride.w] : T{};
        });
      for (int64_t g = 0; g < p.groups; g++) {
        // One group's patches: where they were gathered or, of a pointwise layer, the input itself.
        const T* matrix = pointwise ? x + g * channels * p.x_stride.c : columns + g * images * taken * depth;
        const int64_t row_stride = pointwise ? p.in_channels : depth;
        const int64_t image_stride = pointwise ? p.in_channels * pixels : depth * taken;
        const T* weights = w + g * kernels * depth;
        const int64_t first = n0 * p.y_stride.n + h0 * p.y_stride.h + g * kernels * p.y_stride.c;
        void* const out = sums ? static_cast<void*>(sums + first) : y + first;
        const DType type = sums ? DType::f32 : p.dtype;
        if (channels_last)
          cublas_gemm(p.dtype, type, p.allow_tf32,
                      {images * taken, kernels, depth, matrix, row_stride, 0, false, weights, depth, 0, true, out, p.out_channels,
                       0, 1, add},
                      scratch);
        else
          cublas_gemm(p.dtype, type, p.allow_tf32,
                      {kernels, taken, depth, weights, depth, 0, false, matrix, taken, image_stride, false, out, pixels,
                       p.y_stride.n, images, add},
                      scratch);
      }
    }
  if (sums)
    for_each(outputs_of(p), workspace, "conv2d_im2col", [=, kernels = p.out_channels] __device__(int64_t i) {
      const int64_t k = channels_last ? i % kernels : i / pixels % kernels;
      store_acc(y + i, static_cast<Acc<T>>(sums[i]) + load_acc(b + k));
    });
}

AI3_ALGORITHM(conv2d, im2col, .supports = im2col_supports, .workspace = im2col_workspace, .gradients = gradients_by_im2col)

}  // namespace

const Algorithm<Conv2dProblem>& conv2d_im2col_record() { return conv2d_im2col_algorithm; }

}  // namespace ai3::inline AI3_LEVEL

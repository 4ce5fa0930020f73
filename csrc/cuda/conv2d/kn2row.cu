// kn2row (Vasudevan, Anderson & Gregg 2017): every tap is a 1x1 convolution, which cuBLAS multiplies on the input as it lies; the
// products are added up at shifted places. Images go through the workspace in chunks, so that it stays bounded.
#include "../core/cublas.cuh"
#include "../core/device.cuh"
#include "gradients.cuh"

namespace ai3::inline AI3_LEVEL {
namespace {

// Elements for one image: the products of a tap at every input pixel, and the sums.
int64_t product_elements(const Conv2dProblem& p) { return checked_product({p.out_channels, p.in_height, p.in_width}); }
int64_t sum_elements(const Conv2dProblem& p) { return checked_product({p.out_channels, p.out_height, p.out_width}); }
int64_t accumulator_size(const Conv2dProblem& p) { return p.dtype == DType::f64 ? 8 : 4; }
int64_t images_of(const Conv2dProblem& p) {
  const int64_t image = checked_mul(checked_add(product_elements(p), sum_elements(p)), accumulator_size(p));
  return in_a_chunk(image, p.batch);
}
bool kn2row_supports(const Conv2dProblem& p, Reason& reason) {
  if (!device_supports(p, reason)) return false;
  if (!sizes_known(p)) return cublas_supports({p.in_channels, p.out_channels}, reason);
  return cublas_supports({p.in_channels, p.out_channels, checked_mul(p.in_height, p.in_width), p.batch}, reason);
}
int64_t kn2row_workspace(const Conv2dProblem& p) {
  auto bytes = [&](int64_t elements) {
    return piece_bytes<char>(checked_product({images_of(p), elements, accumulator_size(p)}));
  };
  return checked_add(cublas_workspace(), checked_add(bytes(product_elements(p)), bytes(sum_elements(p))));
}

// The weight as one matrix for each tap: (taps, K, C / groups).
int64_t kn2row_packed_bytes(const Conv2dProblem& p) {
  return piece_bytes<char>(
      checked_product({p.out_channels, p.in_channels / p.groups, p.kernel_height, p.kernel_width, size_of(p.dtype)}));
}
template <class T>
void write_taps(const Conv2dProblem& p, const T* from, T* to, const Workspace& workspace) {
  const int64_t taps = p.kernel_height * p.kernel_width, filters = p.out_channels * (p.in_channels / p.groups);
  for_each(filters * taps, workspace, "kn2row's weights",
           [=] __device__(int64_t i) { to[i] = from[i % filters * taps + i / filters]; });
}
void kn2row_pack(const Conv2dProblem& p, const Operand& weight, const Operand& packed, Workspace& workspace) {
  with_type(p.dtype, [&]<class T>() { write_taps(p, weight.read<T>(), packed.write<T>(), workspace); });
}

template <class T>
void conv2d_kn2row(const Conv2dProblem& p, const T* x, const T* w, const T* b, T* y, Workspace& workspace) {
  using A = Acc<T>;
  const int64_t channels = p.in_channels / p.groups, kernels = p.out_channels / p.groups;
  const int64_t in_pixels = p.in_height * p.in_width, out_pixels = p.out_height * p.out_width, chunk = images_of(p);
  const bool nhwc = p.x_stride.c == 1, channels_last = p.y_stride.c == 1;
  void* scratch = take<char>(workspace, cublas_workspace());
  A* const products = take<A>(workspace, chunk * product_elements(p));
  A* const sums = take<A>(workspace, chunk * sum_elements(p));
  const DType accumulator = p.dtype == DType::f64 ? DType::f64 : DType::f32;
  for (int64_t n0 = 0; n0 < p.batch; n0 += chunk) {
    const int64_t images = p.batch - n0 < chunk ? p.batch - n0 : chunk, count = images * p.out_channels * out_pixels;
    for (int64_t tap = 0; tap < p.kernel_height * p.kernel_width; tap++) {
      // Products of the layout of x: products[n][pixel][k] or products[n][k][pixel].
      for (int64_t g = 0; g < p.groups; g++) {
        const T* matrix = x + n0 * p.x_stride.n + g * channels * p.x_stride.c;
        const T* weights = w + (tap * p.out_channels + g * kernels) * channels;
        A* out = products + g * kernels * (nhwc ? 1 : in_pixels);
        if (nhwc)
          cublas_gemm(p.dtype, accumulator, p.allow_tf32,
                      {in_pixels, kernels, channels, matrix, p.in_channels, p.x_stride.n, false, weights, channels, 0, true, out,
                       p.out_channels, p.out_channels * in_pixels, images, false},
                      scratch);
        else
          cublas_gemm(p.dtype, accumulator, p.allow_tf32,
                      {kernels, in_pixels, channels, weights, channels, 0, false, matrix, in_pixels, p.x_stride.n, false, out,
                       in_pixels, p.out_channels * in_pixels, images, false},
                      scratch);
      }
      const int64_t row = tap / p.kernel_width * p.dilation_h - p.pad_h, column = tap % p.kernel_width * p.dilation_w - p.pad_w;
      for_each(count, workspace, "conv2d_kn2row", [=] __device__(int64_t i) {
        const Place at = place_of(i, p.out_channels, p.out_height, p.out_width, channels_last);
        const int64_t h = at.h * p.stride_h + row, v = at.w * p.stride_w + column, pixel = h * p.in_width + v;
        A sum = tap > 0 ? sums[i] : b ? load_acc(b + at.c) : A(0);
        if (h >= 0 && h < p.in_height && v >= 0 && v < p.in_width)
          sum += products[nhwc ? (at.n * in_pixels + pixel) * p.out_channels + at.c
                               : (at.n * p.out_channels + at.c) * in_pixels + pixel];
        sums[i] = sum;
      });
    }
    for_each(count, workspace, "conv2d_kn2row", [=] __device__(int64_t i) {
      Place at = place_of(i, p.out_channels, p.out_height, p.out_width, channels_last);
      at.n += n0;
      store_acc(y + offset_of(at, p.y_stride), sums[i]);
    });
  }
}

AI3_ALGORITHM(conv2d, kn2row, .supports = kn2row_supports, .workspace = kn2row_workspace, .packed_bytes = kn2row_packed_bytes,
              .pack = kn2row_pack, .gradients = gradients_by_im2col)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

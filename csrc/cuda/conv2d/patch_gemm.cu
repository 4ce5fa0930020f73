// Patches that follow one another: the stride is the kernel and nothing is padded. In NHWC a row of a patch is one run of memory
// and the same rows of the patches of a row of outputs are a matrix, which cuBLAS multiplies where it lies: one product for each
// row of the kernel, added up in the accumulator's type. With several groups, whose channels lie between each other's, one for
// each tap. Other images are copied into NHWC first; sums that are not the output yet go through the workspace.
#include "../../algos/conv2d/delegated.h"
#include "../../algos/conv2d/following_patches.h"
#include "../core/cublas.cuh"
#include "../core/device.cuh"
#include "gradients.cuh"

namespace ai3::inline AI3_LEVEL {
namespace {

// Products of a patch: of its rows or its pixels.
int64_t parts_of(const Conv2dProblem& p) { return p.groups == 1 ? p.kernel_height : p.kernel_height * p.kernel_width; }
bool supports(const Conv2dProblem& p, Reason& reason) {
  if (!device_supports(p, reason) || !patches_follow(p, reason)) return false;
  if (!sizes_known(p)) return cublas_supports({p.in_channels, p.out_channels}, reason);
  return cublas_supports(
      {checked_mul(p.in_channels, p.kernel_width), p.out_channels, p.out_width, checked_mul(p.batch, p.out_height)}, reason);
}
int64_t inputs_of(const Conv2dProblem& p) { return checked_product({p.batch, p.in_channels, p.in_height, p.in_width}); }
int64_t outputs_of(const Conv2dProblem& p) { return checked_product({p.batch, p.out_channels, p.out_height, p.out_width}); }
bool is_transposed(const Conv2dProblem& p) { return p.x_stride.c != 1 && p.in_channels > 1; }
// Sums of 16 bits would be rounded after each product, and those in NHWC are what the next layer of NCHW does not read.
bool sums_apart(const Conv2dProblem& p) { return size_of(p.dtype) == 2 || (p.y_stride.c != 1 && p.out_channels > 1); }
int64_t workspace_of(const Conv2dProblem& p) {
  return with_type(p.dtype, [&]<class T>() {
    const int64_t transposed = is_transposed(p) ? piece_bytes<T>(inputs_of(p)) : 0;
    const int64_t sums = sums_apart(p) ? piece_bytes<Acc<T>>(outputs_of(p)) : 0;
    return checked_add(cublas_workspace(), checked_add(transposed, sums));
  });
}

// The weight as one matrix for each part: (kernel height, K, kernel width, C), or (taps, K, C / groups).
int64_t packed_bytes_of(const Conv2dProblem& p) {
  return piece_bytes<char>(
      checked_product({p.out_channels, p.in_channels / p.groups, p.kernel_height, p.kernel_width, size_of(p.dtype)}));
}
template <class T>
void write_parts(const Conv2dProblem& p, const T* from, T* to, const Workspace& workspace) {
  const int64_t channels = p.in_channels / p.groups, taps = p.kernel_height * p.kernel_width, row = taps / parts_of(p),
                filters = p.out_channels;
  for_each(filters * channels * taps, workspace, "patch_gemm's weights", [=] __device__(int64_t i) {
    const Quotient element = divided(i, channels), tap = divided(element.quotient, row), part = divided(tap.quotient, filters);
    to[i] = from[(part.rest * channels + element.rest) * taps + part.quotient * row + tap.rest];
  });
}
void pack_parts(const Conv2dProblem& p, const Operand& weight, const Operand& packed, Workspace& workspace) {
  with_type(p.dtype, [&]<class T>() { write_parts(p, weight.read<T>(), packed.write<T>(), workspace); });
}

template <class T>
void conv2d_patch_gemm(const Conv2dProblem& p, const T* x, const T* w, const T* b, T* y, Workspace& workspace) {
  using A = Acc<T>;
  const int64_t channels = p.in_channels / p.groups, filters = p.out_channels / p.groups, parts = parts_of(p);
  const int64_t depth = channels * p.kernel_height * p.kernel_width / parts, line = p.in_width * p.in_channels;
  void* const scratch = take<char>(workspace, cublas_workspace());
  const T* image = x;
  if (is_transposed(p)) {
    T* const transposed = take<T>(workspace, inputs_of(p));
    for_each(inputs_of(p), workspace, "conv2d_patch_gemm",
             [=, channels = p.in_channels, height = p.in_height, width = p.in_width, strides = p.x_stride] __device__(int64_t i) {
               transposed[i] = x[offset_of(place_of(i, channels, height, width, true), strides)];
             });
    image = transposed;
  }
  A* const apart = sums_apart(p) ? take<A>(workspace, outputs_of(p)) : nullptr;
  const bool add = b && !apart;
  if (add) spread_bias(p, b, y, workspace, "conv2d_patch_gemm");
  // Rows of outputs lie evenly where nothing is left below the patches, over all images.
  const bool evenly = p.out_height * p.kernel_height == p.in_height;
  const int64_t images = evenly ? p.batch : 1, lines = images * p.out_height;
  for (int64_t n = 0; n < p.batch; n += images)
    for (int64_t part = 0; part < parts; part++)
      for (int64_t g = 0; g < p.groups; g++) {
        const int64_t row = part * p.kernel_height / parts, column = p.groups == 1 ? 0 : part % p.kernel_width;
        const T* matrix = image + n * p.in_height * line + row * line + column * p.in_channels + g * channels;
        const T* weights = w + (part * p.out_channels + g * filters) * depth;
        const int64_t first = n * p.out_height * p.out_width * p.out_channels + g * filters;
        cublas_gemm(p.dtype, apart ? (p.dtype == DType::f64 ? DType::f64 : DType::f32) : p.dtype, p.allow_tf32,
                    {p.out_width, filters, depth, matrix, p.kernel_width * p.in_channels, p.kernel_height * line, false, weights,
                     depth, 0, true, apart ? static_cast<void*>(apart + first) : y + first, p.out_channels,
                     p.out_width * p.out_channels, lines, add || part > 0},
                    scratch);
      }
  if (apart)
    for_each(
        outputs_of(p), workspace, "conv2d_patch_gemm",
        [=, channels = p.out_channels, height = p.out_height, width = p.out_width, strides = p.y_stride] __device__(int64_t i) {
          const Place at = place_of(i, channels, height, width, true);
          store_acc(y + offset_of(at, strides), b ? apart[i] + load_acc(b + at.c) : apart[i]);
        });
}

AI3_ALGORITHM(conv2d, patch_gemm, .supports = supports, .workspace = workspace_of, .packed_bytes = packed_bytes_of,
              .pack = pack_parts, .gradients = gradients_by_im2col)

}  // namespace

const Algorithm<Conv2dProblem>& conv2d_patch_gemm_record() { return conv2d_patch_gemm_algorithm; }

}  // namespace ai3::inline AI3_LEVEL

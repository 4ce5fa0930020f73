// Scalar-matrix multiplication (Ofir & Ben-Artzi 2022): an output channel is the sum of the input's channels, each shifted for
// every tap and multiplied with one scalar of the weight. A block of threads has one output channel and a stretch of its pixels;
// its scalars lie in shared memory, a piece at a time, and every thread multiplies each of them with pixels of its own.
#include "../core/device.cuh"
#include "gradients.cuh"

namespace ai3::inline AI3_LEVEL {
namespace {

constexpr int kPixels = 4;     // of a thread, kThreads apart, so that neighbours read neighbouring memory
constexpr int kScalars = 512;  // of a piece

// Scalars are in the weight's order: channel, row, column of the kernel.
template <class T>
__global__ void __launch_bounds__(kThreads)
    smm_kernel(Conv2dProblem p, int64_t stretches, int64_t count, const T* x, const T* w, const T* b, T* y) {
  using A = Acc<T>;
  A* const scalars = shared<A>();
  const int64_t channels = p.in_channels / p.groups, kernels = p.out_channels / p.groups;
  const int64_t taps = p.kernel_height * p.kernel_width, depth = channels * taps, pixels = p.out_height * p.out_width;
  for (int64_t item = blockIdx.x; item < count; item += gridDim.x) {
    const int64_t stretch = item % stretches, k = item / stretches % p.out_channels, n = item / stretches / p.out_channels;
    const T* const image = x + n * p.x_stride.n + k / kernels * channels * p.x_stride.c;
    int64_t top[kPixels], left[kPixels];
    A sums[kPixels];
#pragma unroll
    for (int j = 0; j < kPixels; j++) {
      const int64_t pixel = (stretch * kPixels + j) * kThreads + threadIdx.x;
      top[j] = pixel / p.out_width * p.stride_h - p.pad_h, left[j] = pixel % p.out_width * p.stride_w - p.pad_w;
      if (pixel >= pixels) top[j] = -p.kernel_height * p.dilation_h;  // outside of the image for every tap
      sums[j] = b ? load_acc(b + k) : A(0);
    }
    for (int64_t first = 0; first < depth; first += kScalars) {
      const int64_t piece = depth - first < kScalars ? depth - first : kScalars;
      __syncthreads();  // the piece before has been read
      for (int64_t i = threadIdx.x; i < piece; i += kThreads) scalars[i] = load_acc(w + k * depth + first + i);
      __syncthreads();
      for (int64_t i = 0; i < piece; i++) {
        const int64_t d = first + i, row = d % taps / p.kernel_width * p.dilation_h, column = d % p.kernel_width * p.dilation_w;
        const T* const plane = image + d / taps * p.x_stride.c;
#pragma unroll
        for (int j = 0; j < kPixels; j++) {
          const int64_t h = top[j] + row, v = left[j] + column;
          if (h >= 0 && h < p.in_height && v >= 0 && v < p.in_width)
            sums[j] += scalars[i] * load_acc(plane + h * p.x_stride.h + v * p.x_stride.w);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kPixels; j++) {
      const int64_t pixel = (stretch * kPixels + j) * kThreads + threadIdx.x;
      if (pixel < pixels)
        store_acc(
            y + n * p.y_stride.n + k * p.y_stride.c + pixel / p.out_width * p.y_stride.h + pixel % p.out_width * p.y_stride.w,
            sums[j]);
    }
  }
}

template <class T>
void conv2d_smm(const Conv2dProblem& p, const T* x, const T* w, const T* b, T* y, Workspace& workspace) {
  const int64_t stretches = ceil_div(p.out_height * p.out_width, kThreads * kPixels);
  const int64_t count = p.batch * p.out_channels * stretches, most = 1 << 20;
  if (count == 0) return;
  launch(smm_kernel<T>, {count < most ? count : most}, kThreads, kScalars * static_cast<int64_t>(sizeof(Acc<T>)), workspace,
         "conv2d_smm", p, stretches, count, x, w, b, y);
}

AI3_ALGORITHM(conv2d, smm, .supports = device_supports<Conv2dProblem>, .gradients = gradients_by_im2col)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

#include "../../algos/adaptive_avg_pool2d/problem.h"
#include "../core/block.cuh"

namespace ai3::inline AI3_LEVEL {
namespace {

constexpr int64_t kLarge = 64;  // elements of a window that a block sums

// A plane is averaged to one element, by a block of threads: one thread would read it alone.
template <class T>
__global__ void __launch_bounds__(kThreads) average_planes(int64_t planes, int64_t pixels, const T* x, T* y) {
  using A = Acc<T>;
  A* const memory = shared<A>();
  for (int64_t plane = blockIdx.x; plane < planes; plane += gridDim.x) {
    A sum = 0;
    for (int64_t i = threadIdx.x; i < pixels; i += kThreads) sum += load_acc(x + plane * pixels + i);
    sum = reduce<kThreads>(sum, memory, Sum());
    if (threadIdx.x == 0) store_acc(y + plane, sum / static_cast<A>(pixels));
  }
}

// Window i of `out` over `in` elements spans [floor(i*in/out), ceil((i+1)*in/out)), as in ATen.
template <class T>
void adaptive_avg_pool2d_direct(const Pool2dProblem& p, const T* x, T* y, Workspace& workspace) {
  const int64_t pixels = p.in_height * p.in_width;
  if (p.out_height == 1 && p.out_width == 1 && pixels >= kLarge && p.x_stride.w == 1 && p.x_stride.c == pixels)
    return launch(average_planes<T>, {blocks_for(p.batch * p.channels)}, kThreads, reduce_bytes<Acc<T>>(kThreads), workspace,
                  "adaptive_avg_pool2d_direct", p.batch * p.channels, pixels, x, y);
  const bool channels_last = p.y_stride.c == 1;
  for_each(p.batch * p.channels * p.out_height * p.out_width, workspace, "adaptive_avg_pool2d_direct", [=] __device__(int64_t i) {
    const Place at = place_of(i, p.channels, p.out_height, p.out_width, channels_last);
    const T* plane = x + at.n * p.x_stride.n + at.c * p.x_stride.c;
    const int64_t h0 = at.h * p.in_height / p.out_height, h1 = ((at.h + 1) * p.in_height + p.out_height - 1) / p.out_height;
    const int64_t w0 = at.w * p.in_width / p.out_width, w1 = ((at.w + 1) * p.in_width + p.out_width - 1) / p.out_width;
    Acc<T> sum = 0;
    for (int64_t h = h0; h < h1; h++)
      for (int64_t v = w0; v < w1; v++) sum += load_acc(plane + h * p.x_stride.h + v * p.x_stride.w);
    store_acc(y + offset_of(at, p.y_stride), sum / static_cast<Acc<T>>((h1 - h0) * (w1 - w0)));
  });
}

AI3_ALGORITHM(adaptive_avg_pool2d, direct, .supports = device_supports<Pool2dProblem>)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

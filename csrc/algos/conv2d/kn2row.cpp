// kn2row (Vasudevan, Anderson & Gregg 2017): a kh x kw convolution is kh * kw 1x1 convolutions, plain matrix products on the
// input as it lies, whose results are added up at shifted places. As in the accumulating form (Anderson et al., "Low-memory
// GEMM-based convolution algorithms", 2017) each product adds to its shifted place at once, here in a block of sums that stays in
// the cache.
#include "backward.h"
#include "patches.h"
#include "problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

// Tasks are rows of output pixels by panels of filters; a task's input and sums stay in the cache.
template <class T>
Grid grid_of(const Conv2dProblem& p, const ConvShape& s) {
  return gemm_grid<Acc<T>>(p.threads, p.batch * p.groups, p.out_height, p.out_width, panel_count<Acc<T>>(s.filters),
                           s.channels + kPanel<Acc<T>>, 0);
}
template <class T>
int64_t block_size(const Conv2dProblem& p, const Grid& grid) {
  return round_up(checked_product({ceil_div(p.out_height, grid.prepared), p.out_width, kPanel<Acc<T>>}), 64);
}
int64_t conv2d_kn2row_workspace(const Conv2dProblem& p) {
  if (!is_concrete(p)) return 0;
  return with_type(p.dtype, [&]<class T>() {
    const int64_t sums = checked_mul(p.threads, block_size<T>(p, grid_of<T>(p, ConvShape(p))));
    return checked_add(workspace_bytes<Acc<T>>(nhwc_copy_size<T>(p)), workspace_bytes<Acc<T>>(sums));
  });
}

template <class T>
void conv2d_kn2row(const Conv2dProblem& p, const Conv2dOperands& m, Workspace& workspace) {
  using A = Acc<T>;
  constexpr int64_t P = kPanel<A>;
  const ConvShape s(p);
  const Grid grid = grid_of<T>(p, s);
  const NhwcInput<T> x(p, m.input.read<T>(), workspace);
  const int64_t size = block_size<T>(p, grid);
  A* blocks = workspace.take<A>(p.threads * size);
  for_grid(p.threads, p.batch * p.groups, grid, [&](int64_t product, int64_t i, int64_t j, int thread) {
    const int64_t image = product / p.groups, group = product % p.groups;
    const Share lines = share(p.out_height, grid.prepared, i), filters = column_share<A>(s.filters, grid.streamed, j);
    const A* input = x.data + image * x.stride.n + group * s.channels;
    A* sums = blocks + thread * size;
    const int64_t pixels = (lines.end - lines.begin) * p.out_width;
    for (int64_t f = filters.begin; f < filters.end; f += P) {
      const A* panel = packed_group<T>(m, s, group) + f * s.depth;
      clear(sums, pixels * P);
      for (int64_t t = 0; t < s.taps; t++, panel += s.channels * P) {
        const int64_t dh = t / p.kernel_width * p.dilation_h - p.pad_h, dw = t % p.kernel_width * p.dilation_w - p.pad_w;
        const Range ow = inside(dw, p.stride_w, p.in_width, p.out_width), oh = inside(dh, p.stride_h, p.in_height, p.out_height);
        for (int64_t line = oh.begin > lines.begin ? oh.begin : lines.begin; line < oh.end && line < lines.end; line++)
          gemm_block(input + (line * p.stride_h + dh) * x.stride.h + (ow.begin * p.stride_w + dw) * x.stride.w,
                     p.stride_w * x.stride.w, ow.end - ow.begin, panel, P, s.channels,
                     sums + ((line - lines.begin) * p.out_width + ow.begin) * P, P, true);
      }
      store_block(image_rows<T>(p, s, m, image, group).from(lines.begin * p.out_width, f), sums, P, pixels,
                  filters.end - f < P ? filters.end - f : P);
    }
  });
}

Cost conv2d_kn2row_cost(const Conv2dProblem& p) { return gemm_cost(p, 0, .8); }

AI3_ALGORITHM(conv2d, kn2row, .epilogue = true, .workspace = conv2d_kn2row_workspace, .cost = conv2d_kn2row_cost,
              .packed_bytes = packed_weight_bytes, .pack = pack_weight, .gradients = by_patches, .sliced = true)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

// Patches that follow one another: the stride is the kernel and nothing is padded, as in the patch embeddings of vision
// transformers (Dosovitskiy et al., "An Image is Worth 16x16 Words", 2021) and where networks halve their maps. Each pixel
// belongs to one patch, and in NHWC a patch is one run of memory for each of its rows. So the patches are a matrix as the image
// lies: the product reads them through a pointer to each run, and nothing is gathered, computed beforehand or padded. Input that
// is not float or double in NHWC is copied once.
#include "backward.h"
#include "delegated.h"
#include "following_patches.h"
#include "patches.h"
#include "problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

template <class T>
Grid grid_of(const Conv2dProblem& p, const ConvShape& s) {
  return gemm_grid<Acc<T>>(p.threads, p.batch * p.groups, ceil_div(s.pixels, kRows), kRows, panel_count<Acc<T>>(s.filters),
                           s.depth, 0);
}
// Pointers of each thread's block of patches, of which each pixel may have one.
int64_t block_size(const ConvShape& s, const Grid& grid) {
  return round_up(checked_product({ceil_div(ceil_div(s.pixels, kRows), grid.prepared), kRows, s.taps}), 64);
}
int64_t workspace(const Conv2dProblem& p) {
  if (!is_concrete(p)) return 0;
  return with_type(p.dtype, [&]<class T>() {
    const ConvShape s(p);
    const int64_t pointers = checked_mul(p.threads, block_size(s, grid_of<T>(p, s)));
    return checked_add(workspace_bytes<Acc<T>>(nhwc_copy_size<T>(p)), workspace_bytes<const Acc<T>*>(pointers));
  });
}

template <class T>
void conv2d_patch_gemm(const Conv2dProblem& p, const Conv2dOperands& m, Workspace& workspace) {
  using A = Acc<T>;
  const ConvShape s(p);
  const Grid grid = grid_of<T>(p, s);
  const NhwcInput<T> x(p, m.input.read<T>(), workspace);
  // A row of a patch is one run, but where the channels of other groups, or of a larger tensor, lie between its pixels.
  const bool whole_rows = p.groups == 1 && x.stride.w == p.in_channels;
  const int64_t size = block_size(s, grid), of_row = whole_rows ? 1 : p.kernel_width, runs = p.kernel_height * of_row;
  const A** blocks = workspace.take<const A*>(p.threads * size);
  for_grid(p.threads, p.batch * p.groups, grid, [&](int64_t product, int64_t i, int64_t j, int thread) {
    const int64_t image = product / p.groups, group = product % p.groups;
    const Share rows = row_share(s.pixels, grid.prepared, i), filters = column_share<A>(s.filters, grid.streamed, j);
    const int64_t n = rows.end - rows.begin;
    const A** pointers = blocks + thread * size;
    for (int64_t r = 0; r < n; r++) {
      const int64_t pixel = rows.begin + r, oh = pixel / p.out_width, ow = pixel % p.out_width;
      const A* patch = x.data + image * x.stride.n + oh * p.kernel_height * x.stride.h + ow * p.kernel_width * x.stride.w;
      for (int64_t run = 0; run < runs; run++)
        pointers[run * n + r] = patch + run / of_row * x.stride.h + run % of_row * x.stride.w;
    }
    gemm_block<T>(IndirectRows<A>{pointers, n, group * s.channels, s.depth / runs}, n,
                  packed_group<T>(m, s, group) + filters.begin * s.depth, filters.end - filters.begin, s.depth,
                  image_rows<T>(p, s, m, image, group).from(rows.begin, filters.begin));
  });
}

Cost cost(const Conv2dProblem& p) { return gemm_cost(p, 0, .92); }

AI3_ALGORITHM(conv2d, patch_gemm, .epilogue = true, .supports = patches_follow, .workspace = workspace, .cost = cost,
              .packed_bytes = packed_weight_bytes, .pack = pack_weight, .gradients = by_patches, .sliced = true)

}  // namespace

const Algorithm<Conv2dProblem>& conv2d_patch_gemm_record() { return conv2d_patch_gemm_algorithm; }

}  // namespace ai3::inline AI3_LEVEL

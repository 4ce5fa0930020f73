// Patches that follow one another: the stride is the kernel and nothing is padded, as in the patch embeddings of vision
// transformers (Dosovitskiy et al., "An Image is Worth 16x16 Words", 2021) and where networks halve their maps. Each pixel
// belongs to one patch, and in NHWC a patch is one run of memory for each of its rows. So the patches are a matrix as the image
// lies: the product reads them through a pointer to each run, and nothing is gathered, computed beforehand or padded. Input that
// is not float or double in NHWC is copied once.
#include "backward.h"
#include "delegated.h"
#include "following_patches.h"
#include "indirect.h"
#include "problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

int64_t workspace(const Conv2dProblem& p) {
  if (!is_concrete(p)) return 0;
  return with_type(p.dtype, [&]<class T>() { return Indirect<T>(p).workspace(); });
}

template <class T>
void conv2d_patch_gemm(const Conv2dProblem& p, const Conv2dOperands& m, Workspace& workspace) {
  using A = Acc<T>;
  const NhwcInput<T> x(p, m.input.read<T>(), workspace);
  // A row of a patch is one run, but where the channels of other groups, or of a larger tensor, lie between its pixels.
  const bool whole_rows = p.groups == 1 && x.stride.w == p.in_channels;
  const int64_t of_row = whole_rows ? 1 : p.kernel_width, runs = p.kernel_height * of_row;
  Indirect<T>(p).multiply(m, runs, workspace, [&](const A** pointers, int64_t image, Share pixels) {
    const int64_t n = pixels.size();
    for (int64_t r = 0; r < n; r++) {
      const int64_t pixel = pixels.begin + r, oh = pixel / p.out_width, ow = pixel % p.out_width;
      const A* patch = x.data + image * x.stride.n + oh * p.kernel_height * x.stride.h + ow * p.kernel_width * x.stride.w;
      for (int64_t run = 0; run < runs; run++)
        pointers[run * n + r] = patch + run / of_row * x.stride.h + run % of_row * x.stride.w;
    }
  });
}

Cost cost(const Conv2dProblem& p) { return gemm_cost(p, 0, .92); }

AI3_ALGORITHM(conv2d, patch_gemm, .epilogue = true, .supports = patches_follow, .workspace = workspace, .cost = cost,
              .packed_bytes = packed_weight_bytes, .pack = pack_weight, .gradients = by_patches, .sliced = true)

}  // namespace

const Algorithm<Conv2dProblem>& conv2d_patch_gemm_record() { return conv2d_patch_gemm_algorithm; }

}  // namespace ai3::inline AI3_LEVEL

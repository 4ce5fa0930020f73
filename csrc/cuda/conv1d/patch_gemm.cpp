// conv2d's patch_gemm on images of height 1.
#include "../../algos/conv1d/problem.h"
#include "../../algos/conv2d/delegated.h"
#include "../../algos/conv2d/following_patches.h"

namespace ai3::inline AI3_LEVEL {
namespace {

using Of = Delegated<conv2d_patch_gemm_record>;

bool supports(const Conv2dProblem& p, Reason& reason) { return patches_of_a_line_follow(p, reason) && Of::supports(p, reason); }

AI3_REGISTER_(conv1d, patch_gemm, Of::run, .supports = supports, .workspace = Of::workspace, .packed_bytes = Of::packed_bytes,
              .pack = Of::pack, .gradients = Of::gradients)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

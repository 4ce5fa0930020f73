// conv2d's patch_gemm on images of height 1.
#include "../conv2d/delegated.h"
#include "../conv2d/following_patches.h"
#include "problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

using Of = Delegated<conv2d_patch_gemm_record>;

AI3_REGISTER_(conv1d, patch_gemm, Of::run, .epilogue = true, .supports = patches_of_a_line_follow, .workspace = Of::workspace,
              .cost = Of::cost, .packed_bytes = Of::packed_bytes, .pack = Of::pack, .gradients = Of::gradients)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

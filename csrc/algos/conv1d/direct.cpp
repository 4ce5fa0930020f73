// conv2d's direct on images of height 1.
#include "../conv2d/delegated.h"
#include "problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

using Of = Delegated<conv2d_direct_record>;

AI3_REGISTER_(conv1d, direct, Of::run, .epilogue = true, .workspace = Of::workspace, .cost = Of::cost,
              .packed_bytes = Of::packed_bytes, .pack = Of::pack, .gradients = Of::gradients)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

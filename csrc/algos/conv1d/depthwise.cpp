// conv2d's depthwise on images of height 1.
#include "../conv2d/delegated.h"
#include "problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

using Of = Delegated<conv2d_depthwise_record>;

AI3_REGISTER_(conv1d, depthwise, Of::run, .epilogue = true, .supports = Of::supports, .workspace = Of::workspace,
              .cost = Of::cost, .packed_bytes = Of::packed_bytes, .pack = Of::pack, .gradients = Of::gradients)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

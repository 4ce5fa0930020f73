// conv2d's im2col on images of height 1.
#include "../conv2d/delegated.h"
#include "problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

using Of = Delegated<conv2d_im2col_record>;

AI3_REGISTER_(conv1d, im2col, Of::run, .epilogue = true, .workspace = Of::workspace, .cost = Of::cost,
              .packed_bytes = Of::packed_bytes, .pack = Of::pack, .gradients = Of::gradients)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

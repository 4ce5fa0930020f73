// conv2d's im2col on images of height 1.
#include "../../algos/conv1d/problem.h"
#include "../../algos/conv2d/delegated.h"

namespace ai3::inline AI3_LEVEL {
namespace {

using Of = Delegated<conv2d_im2col_record>;

AI3_REGISTER_(conv1d, im2col, Of::run, .supports = Of::supports, .workspace = Of::workspace, .gradients = Of::gradients)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

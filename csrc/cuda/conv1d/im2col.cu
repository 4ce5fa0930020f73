// conv2d's im2col on images of height 1.
#include "../../algos/conv1d/problem.h"
#include "../../algos/conv2d/lent.h"
#include "../core/device.cuh"

namespace ai3::inline AI3_LEVEL {
namespace {

using Of = Lent<conv2d_im2col_record>;
bool im2col_supports(const Conv2dProblem& p, Reason& reason) { return conv2d_im2col_record().traits.supports(p, reason); }

AI3_REGISTER_(conv1d, im2col, Of::run, .supports = im2col_supports, .workspace = Of::workspace, .gradients = Of::gradients)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

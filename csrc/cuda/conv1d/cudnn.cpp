// conv2d's cudnn on images of height 1.
#include "../../algos/conv1d/problem.h"
#include "../../algos/conv2d/delegated.h"

namespace ai3::inline AI3_LEVEL {
namespace {

using Of = Delegated<conv2d_cudnn_record>;

AI3_REGISTER_(conv1d, cudnn, Of::run, .epilogue = true, .activations = activation_bit(Activation::relu), .supports = Of::supports,
              .workspace = Of::workspace, .packed_bytes = Of::packed_bytes, .pack = Of::pack, .gradients = Of::gradients)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

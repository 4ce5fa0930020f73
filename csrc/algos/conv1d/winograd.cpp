// conv2d's winograd_general on images of height 1.
#include "../conv2d/delegated.h"
#include "problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

using Of = Delegated<conv2d_winograd_general_record>;

bool supports(const Conv2dProblem& p, Reason& reason) {
  if (Of::supports(p, reason)) return true;
  return refuse(reason, "needs a kernel of 3 or 7 taps with stride 1 and dilation 1, got kernel %lld, stride %lld, dilation %lld",
                static_cast<long long>(p.kernel_width), static_cast<long long>(p.stride_w), static_cast<long long>(p.dilation_w));
}

AI3_REGISTER_(conv1d, winograd, Of::run, .accuracy = Accuracy::bounded, .error_bound = 2e-5, .epilogue = true,
              .supports = supports, .workspace = Of::workspace, .cost = Of::cost, .packed_bytes = Of::packed_bytes,
              .pack = Of::pack, .gradients = Of::gradients)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

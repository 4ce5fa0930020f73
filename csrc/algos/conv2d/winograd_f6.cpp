// Winograd F(6x6, 3x3): 64 products instead of 324. It loses more digits than F(4x4, 3x3), so no rule picks it.
#include "problem.h"
#include "winograd_gradient.h"

namespace ai3::inline AI3_LEVEL {
namespace {

template <class T>
void conv2d_winograd_f6(const Conv2dProblem& p, const Conv2dOperands& buffers, Workspace& workspace) {
  TransformDomain<Winograd<6>, T>(p).run(buffers, workspace);
}

AI3_ALGORITHM(conv2d, winograd_f6, .accuracy = Accuracy::bounded, .error_bound = 1e-4, AI3_WINOGRAD_TRAITS(Winograd<6>),
              AI3_WINOGRAD_GRADIENTS("winograd_f6", FormOf3x3<6>), .sliced = true)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

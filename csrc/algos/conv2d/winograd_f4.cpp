// Winograd F(4x4, 3x3): 36 products instead of 144.
#include "problem.h"
#include "winograd_gradient.h"

namespace ai3::inline AI3_LEVEL {
namespace {

template <class T>
void conv2d_winograd_f4(const Conv2dProblem& p, const Conv2dOperands& buffers, Workspace& workspace) {
  TransformDomain<Winograd<4>, T>(p).run(buffers, workspace);
}

AI3_ALGORITHM(conv2d, winograd_f4, .accuracy = Accuracy::bounded, .error_bound = 2e-5, AI3_WINOGRAD_TRAITS(Winograd<4>),
              AI3_WINOGRAD_GRADIENTS("winograd_f4", FormOf3x3<4>), .sliced = true)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

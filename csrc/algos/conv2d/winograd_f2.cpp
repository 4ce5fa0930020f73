// Winograd F(2x2, 3x3): 16 products instead of 36. Its points 0, +-1 and infinity keep small integers exact.
#include "problem.h"
#include "winograd_gradient.h"

namespace ai3::inline AI3_LEVEL {
namespace {

template <class T>
void conv2d_winograd_f2(const Conv2dProblem& p, const Conv2dOperands& buffers, Workspace& workspace) {
  TransformDomain<Winograd<2>, T>(p).run(buffers, workspace);
}

AI3_ALGORITHM(conv2d, winograd_f2, .accuracy = Accuracy::bounded, .error_bound = 5e-6, AI3_WINOGRAD_TRAITS(Winograd<2>),
              AI3_WINOGRAD_GRADIENTS("winograd_f2", FormOf3x3<2>), .sliced = true)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

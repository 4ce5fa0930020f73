// F(2x2, 3x3); the bound is that of the CPU's.
#include "winograd.cuh"

namespace ai3::inline AI3_LEVEL {
namespace {

template <class T>
void conv2d_winograd_f2(const Conv2dProblem& p, const Conv2dOperands& m, Workspace& workspace) {
  Winograd<2>::run<T>(p, m, workspace);
}

AI3_ALGORITHM(conv2d, winograd_f2, .accuracy = Accuracy::bounded, .error_bound = 5e-6, AI3_WINOGRAD(2))

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

// F(4x4, 3x3). The bound is twice that of the CPU's: cuBLAS sums all channels of a place in one chain.
#include "../../algos/conv2d/delegated.h"
#include "winograd.cuh"

namespace ai3::inline AI3_LEVEL {
namespace {

template <class T>
void conv2d_winograd_f4(const Conv2dProblem& p, const Conv2dOperands& m, Workspace& workspace) {
  Winograd<4>::run<T>(p, m, workspace);
}

AI3_ALGORITHM(conv2d, winograd_f4, .accuracy = Accuracy::bounded, .error_bound = 4e-5, AI3_WINOGRAD(4))

}  // namespace

const Algorithm<Conv2dProblem>& conv2d_winograd_f4_record() { return conv2d_winograd_f4_algorithm; }

}  // namespace ai3::inline AI3_LEVEL

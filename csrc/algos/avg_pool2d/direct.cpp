// Average pooling: the sum of each window's values in the accumulator's type, divided by what ATen's arguments say.
#include "../core/pool.h"
#include "problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

template <class T>
void avg_pool2d_direct(const Pool2dProblem& p, const T* x, T* y, Workspace& workspace) {
  pool2d<Mean>(p, false, x, y, workspace);
}

int64_t workspace(const Pool2dProblem& p) { return pool2d_workspace(p, false); }

AI3_ALGORITHM(avg_pool2d, direct, .workspace = workspace, .sliced = true)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

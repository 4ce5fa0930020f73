// Max pooling: the largest value of each window, NaN if it holds one; padding never wins.
#include "../core/pool.h"
#include "problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

template <class T>
void max_pool2d_direct(const Pool2dProblem& p, const T* x, T* y, Workspace& workspace) {
  pool2d<Maximum>(p, false, x, y, workspace);
}

int64_t workspace(const Pool2dProblem& p) { return pool2d_workspace(p, false); }

AI3_ALGORITHM(max_pool2d, direct, .workspace = workspace, .sliced = true)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

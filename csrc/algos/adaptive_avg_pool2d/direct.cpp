// Adaptive average pooling: window i of an axis is [floor(i*in/out), ceil((i+1)*in/out)), so that windows may overlap and differ
// in size.
#include "../core/pool.h"
#include "problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

template <class T>
void adaptive_avg_pool2d_direct(const Pool2dProblem& p, const T* x, T* y, Workspace& workspace) {
  pool2d<Mean>(p, true, x, y, workspace);
}

int64_t workspace(const Pool2dProblem& p) { return pool2d_workspace(p, true); }

AI3_ALGORITHM(adaptive_avg_pool2d, direct, .workspace = workspace, .sliced = true)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

// Root mean square layer normalization (Zhang & Sennrich 2019): layer_norm's kernels, around 0 instead of the mean.
#include "../../algos/rms_norm/problem.h"
#include "../core/normalized_rows.cuh"

namespace ai3::inline AI3_LEVEL {
namespace {

template <class T>
void rms_norm_direct(const RmsNormProblem& p, const RmsNormOperands& m, Workspace& workspace) {
  normalize_rows<T>(p, m, workspace, "rms_norm_direct");
}
GradientNames gradients(const RmsNormProblem&) { return {"direct", "direct"}; }

AI3_ALGORITHM(rms_norm, direct, .accuracy = Accuracy::bounded, .error_bound = 4e-6, .supports = device_supports<RmsNormProblem>,
              .gradients = gradients, .backward = rows_backward, .backward_workspace = rows_backward_workspace)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

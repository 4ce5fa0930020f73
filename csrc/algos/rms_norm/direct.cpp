// Row by row, each read into the nearest cache once and from there again: the mean of its squares, the output. Sums of long rows
// are taken in parts, which are added in float64; rows whose squares the type cannot hold, in a unit of their own (moments.h).
// Zhang and Sennrich, "Root mean square layer normalization", 2019.
#include "../core/normalized_rows.h"
#include "problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

template <class T>
void rms_norm_direct(const RmsNormProblem& p, const RmsNormOperands& m, Workspace& workspace) {
  normalize_rows<T>(p, m, workspace);
}
GradientNames gradients(const RmsNormProblem&) { return {"direct", "direct"}; }

AI3_ALGORITHM(rms_norm, direct, .accuracy = Accuracy::bounded, .error_bound = 4e-6, .workspace = rows_workspace,
              .gradients = gradients, .backward = rows_backward, .backward_workspace = rows_backward_workspace)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

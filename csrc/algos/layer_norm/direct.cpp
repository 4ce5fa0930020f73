// Row by row, each read into the nearest cache once and from there again: its mean, its variance around that mean, the output
// (moments.h). Sums of long rows are taken in parts, which are added in float64.
#include "../core/normalized_rows.h"
#include "problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

template <class T>
void layer_norm_direct(const LayerNormProblem& p, const LayerNormOperands& m, Workspace& workspace) {
  normalize_rows<T>(p, m, workspace);
}
GradientNames gradients(const LayerNormProblem&) { return {"direct", "direct"}; }

AI3_ALGORITHM(layer_norm, direct, .accuracy = Accuracy::bounded, .error_bound = 4e-6, .workspace = rows_workspace,
              .gradients = gradients, .backward = rows_backward, .backward_workspace = rows_backward_workspace)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

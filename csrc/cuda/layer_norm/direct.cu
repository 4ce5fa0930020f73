// Layer normalization (Ba, Kiros & Hinton 2016): of each row its mean, its variance around that, then what is written.
#include "../../algos/layer_norm/problem.h"
#include "../core/normalized_rows.cuh"

namespace ai3::inline AI3_LEVEL {
namespace {

template <class T>
void layer_norm_direct(const LayerNormProblem& p, const LayerNormOperands& m, Workspace& workspace) {
  normalize_rows<T>(p, m, workspace, "layer_norm_direct");
}
GradientNames gradients(const LayerNormProblem&) { return {"direct", "direct"}; }

AI3_ALGORITHM(layer_norm, direct, .accuracy = Accuracy::bounded, .error_bound = 4e-6,
              .supports = device_supports<LayerNormProblem>, .gradients = gradients, .backward = rows_backward,
              .backward_workspace = rows_backward_workspace)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

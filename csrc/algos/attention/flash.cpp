// Attention in tiles with an online softmax (Dao et al., "FlashAttention", 2022): flash_forward.h, and its gradients,
// flash_gradients.h.
#include "flash.h"

#include "flash_gradients.h"

namespace ai3::inline AI3_LEVEL {

int64_t flash_workspace(const AttentionProblem& p) {
  return with_type(p.dtype, [&]<class T>() { return forward_bytes<T>(p); });
}
void attend_flash(const AttentionProblem& p, const AttentionOperands& m, Workspace& workspace) {
  with_type(p.dtype, [&]<class T>() { attend_in_tiles<T>(p, m, workspace); });
}
int64_t flash_backward_workspace(const AttentionProblem& p, const AttentionGradients& m) {
  return with_type(p.dtype, [&]<class T>() { return backward_bytes<T>(p, m); });
}
void differentiate_flash(const AttentionProblem& p, const AttentionGradients& m, Workspace& workspace) {
  with_type(p.dtype, [&]<class T>() { differentiate_in_tiles<T>(p, m, workspace); });
}

namespace {

template <class T>
void attention_flash(const AttentionProblem& p, const AttentionOperands& m, Workspace& workspace) {
  attend_in_tiles<T>(p, m, workspace);
}

GradientNames flash_gradients(const AttentionProblem&) { return {"flash", "flash"}; }

AI3_ALGORITHM(attention, flash, .accuracy = Accuracy::bounded, .error_bound = 4e-6, .supports = parameters_fit,
              .workspace = flash_workspace, .gradients = flash_gradients, .backward = differentiate_flash,
              .backward_workspace = flash_backward_workspace, .parameters = AI3_ATTENTION_PARAMETERS)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

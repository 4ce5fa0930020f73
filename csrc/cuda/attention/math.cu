// Attention by its definition: math.cuh.
#include "math.cuh"

namespace ai3::inline AI3_LEVEL {
namespace {

template <class T>
void attention_math(const AttentionProblem& p, const AttentionOperands& m, Workspace& workspace) {
  attend<T>(p, m, workspace);
}
void math_backward(const AttentionProblem& p, const AttentionGradients& m, Workspace& workspace) {
  with_type(p.dtype, [&]<class T>() { differentiate<T>(p, m, workspace); });
}
GradientNames math_gradients(const AttentionProblem&) { return {"math", "math"}; }

bool math_supports(const AttentionProblem& p, Reason& reason) {
  return device_supports(p, reason) && parameters_fit(p, reason) &&
         cublas_supports({p.queries, p.keys, p.size, p.value_size}, reason);
}

AI3_ALGORITHM(attention, math, .accuracy = Accuracy::bounded, .error_bound = 4e-6, .supports = math_supports,
              .workspace = attend_bytes, .gradients = math_gradients, .backward = math_backward,
              .backward_workspace = math_backward_bytes, .parameters = AI3_ATTENTION_PARAMETERS)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

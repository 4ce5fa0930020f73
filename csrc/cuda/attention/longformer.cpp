// Attention within a window, and to and from global tokens: sparse.cuh, in two parts, of the ordinary queries and of the global
// ones, which have projections of their own.
#include "sparse.cuh"

namespace ai3::inline AI3_LEVEL {
namespace {

bool longformer_supports(const AttentionProblem& p, Reason& reason) {
  return device_supports(p, reason) && longformer_fits(p, reason);
}

// The parts of a call; of operands or gradients, those of the global queries beside them.
template <class Operands>
struct Parts {
  SparsePattern patterns[2];
  AttentionProblem problems[2];
  Operands operands[2];
  SparsePart parts[2] = {{&problems[0], &patterns[0]}, {&problems[1], &patterns[1]}};
  Parts(const AttentionProblem& p, const Operands& m, const SparsePattern& band)
      : patterns{band, band}, problems{p, p}, operands{m, m} {
    patterns[1].kind = SparsePattern::Kind::globals;
    set_global(problems[1], operands[1]);
  }
  Parts(const Parts&) = delete;
};

int64_t longformer_workspace(const AttentionProblem& p) {
  const Parts<AttentionOperands> of(p, {}, band_of(p));
  return checked_add(token_bytes(p), sparse_workspace(of.parts, 2));
}
template <class T>
void attention_longformer(const AttentionProblem& p, const AttentionOperands& m, Workspace& workspace) {
  const Parts<AttentionOperands> of(p, m, tokens_of(p, m.own, workspace));
  attend_sparse(of.parts, of.operands, 2, workspace);
}

GradientNames longformer_gradients(const AttentionProblem&) { return {"longformer", "longformer"}; }
int64_t longformer_backward_workspace(const AttentionProblem& p, const AttentionGradients& m) {
  Parts<AttentionGradients> of(p, m, band_of(p));
  set_global_gradients(of.operands[1]);
  return checked_add(token_bytes(p), sparse_backward_workspace(of.parts, of.operands, 2));
}
void longformer_backward(const AttentionProblem& p, const AttentionGradients& m, Workspace& workspace) {
  Parts<AttentionGradients> of(p, m, tokens_of(p, m.own, workspace));
  set_global_gradients(of.operands[1]);
  differentiate_sparse(of.parts, of.operands, 2, workspace);
}

AI3_ALGORITHM(attention, longformer, .accuracy = Accuracy::approximate, .supports = longformer_supports,
              .workspace = longformer_workspace, .gradients = longformer_gradients, .backward = longformer_backward,
              .backward_workspace = longformer_backward_workspace, .parameters = AI3_LONGFORMER_PARAMETERS)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

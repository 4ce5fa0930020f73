// Attention of blocks at the ends, beside each other and random ones: sparse.cuh, by lists that the device makes.
#include "sparse.cuh"

namespace ai3::inline AI3_LEVEL {
namespace {

bool bigbird_supports(const AttentionProblem& p, Reason& reason) { return device_supports(p, reason) && bigbird_fits(p, reason); }
// Of a pattern without its lists, for what it takes.
SparsePattern blocks_of(const AttentionProblem& p) { return BigBirdLists(p, nullptr).pattern(p, nullptr, nullptr); }

int64_t bigbird_workspace(const AttentionProblem& p) {
  const SparsePattern s = blocks_of(p);
  const SparsePart part{&p, &s};
  return checked_add(list_bytes(p), sparse_workspace(&part, 1));
}
template <class T>
void attention_bigbird(const AttentionProblem& p, const AttentionOperands& m, Workspace& workspace) {
  const SparsePattern s = blocks_listed(p, m.own, workspace);
  const SparsePart part{&p, &s};
  attend_sparse(&part, &m, 1, workspace);
}

GradientNames bigbird_gradients(const AttentionProblem&) { return {"bigbird", "bigbird"}; }
int64_t bigbird_backward_workspace(const AttentionProblem& p, const AttentionGradients& m) {
  const SparsePattern s = blocks_of(p);
  const SparsePart part{&p, &s};
  return checked_add(list_bytes(p), sparse_backward_workspace(&part, &m, 1));
}
void bigbird_backward(const AttentionProblem& p, const AttentionGradients& m, Workspace& workspace) {
  const SparsePattern s = blocks_listed(p, m.own, workspace);
  const SparsePart part{&p, &s};
  differentiate_sparse(&part, &m, 1, workspace);
}

AI3_ALGORITHM(attention, bigbird, .accuracy = Accuracy::approximate, .supports = bigbird_supports, .workspace = bigbird_workspace,
              .gradients = bigbird_gradients, .backward = bigbird_backward, .backward_workspace = bigbird_backward_workspace,
              .parameters = AI3_BIGBIRD_PARAMETERS)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

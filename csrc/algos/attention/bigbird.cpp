// Attention of blocks (Zaheer et al., "Big Bird", 2020): a block of queries sees the first and the last block of keys, its own
// one with both neighbours, and random ones; the first and the last block of queries see all keys.
#include "sparse.h"

namespace ai3::inline AI3_LEVEL {
namespace {

int64_t list_bytes(const AttentionProblem& p) {
  const BigBirdLists lists(p, nullptr);
  return checked_add(workspace_bytes<int64_t>(lists.rows()), workspace_bytes<int64_t>(lists.indices()));
}
SparsePattern blocks_listed(const AttentionProblem& p, const Operand* own, Workspace& workspace) {
  const BigBirdLists lists(p, own);
  int64_t *const counts = workspace.take<int64_t>(lists.rows()), *const indices = workspace.take<int64_t>(lists.indices());
  parallel_for(p.threads, lists.rows(), [&](int64_t row, int) { counts[row] = lists.list(row, indices + row * lists.most); });
  return lists.pattern(p, counts, indices);
}

int64_t bigbird_workspace(const AttentionProblem& p) { return checked_add(list_bytes(p), sparse_workspace(p, false)); }
template <class T>
void attention_bigbird(const AttentionProblem& p, const AttentionOperands& m, Workspace& workspace) {
  attend_sparse(p, m, blocks_listed(p, m.own, workspace), false, workspace);
}

GradientNames bigbird_gradients(const AttentionProblem&) { return {"bigbird", "bigbird"}; }
int64_t bigbird_backward_workspace(const AttentionProblem& p, const AttentionGradients&) {
  return checked_add(list_bytes(p), sparse_backward_workspace(p, false));
}
void bigbird_backward(const AttentionProblem& p, const AttentionGradients& m, Workspace& workspace) {
  const SparsePattern s = blocks_listed(p, m.own, workspace);
  const SparsePart part{&p, &m, &s};
  differentiate_sparse(&part, 1, {}, false, workspace);
}

AI3_ALGORITHM(attention, bigbird, .accuracy = Accuracy::approximate, .supports = bigbird_fits, .workspace = bigbird_workspace,
              .gradients = bigbird_gradients, .backward = bigbird_backward, .backward_workspace = bigbird_backward_workspace,
              .parameters = AI3_BIGBIRD_PARAMETERS)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

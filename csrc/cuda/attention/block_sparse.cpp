// Attention over listed blocks of keys for each block of queries: sparse.cuh.
#include "sparse.cuh"

namespace ai3::inline AI3_LEVEL {
namespace {

bool block_sparse_supports(const AttentionProblem& p, Reason& reason) {
  return device_supports(p, reason) && lists_fit(p, reason);
}
// Of a pattern that has no lists yet, for what it takes.
SparsePattern blocks_of(const AttentionProblem& p) {
  const Operand none[Parameters::kAtMost] = {};
  return listed_blocks(p, none);
}

int64_t block_sparse_workspace(const AttentionProblem& p) {
  const SparsePattern s = blocks_of(p);
  const SparsePart part{&p, &s};
  return sparse_workspace(&part, 1);
}
template <class T>
void attention_block_sparse(const AttentionProblem& p, const AttentionOperands& m, Workspace& workspace) {
  const SparsePattern s = listed_blocks(p, m.own);
  const SparsePart part{&p, &s};
  attend_sparse(&part, &m, 1, workspace);
}

GradientNames block_sparse_gradients(const AttentionProblem&) { return {"block_sparse", "block_sparse"}; }
int64_t block_sparse_backward_workspace(const AttentionProblem& p, const AttentionGradients& m) {
  const SparsePattern s = blocks_of(p);
  const SparsePart part{&p, &s};
  return sparse_backward_workspace(&part, &m, 1);
}
void block_sparse_backward(const AttentionProblem& p, const AttentionGradients& m, Workspace& workspace) {
  const SparsePattern s = listed_blocks(p, m.own);
  const SparsePart part{&p, &s};
  differentiate_sparse(&part, &m, 1, workspace);
}

AI3_ALGORITHM(attention, block_sparse, .accuracy = Accuracy::bounded, .error_bound = 4e-6, .supports = block_sparse_supports,
              .workspace = block_sparse_workspace, .gradients = block_sparse_gradients, .backward = block_sparse_backward,
              .backward_workspace = block_sparse_backward_workspace, .parameters = AI3_BLOCK_SPARSE_PARAMETERS)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

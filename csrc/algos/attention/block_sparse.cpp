// Attention over listed blocks of keys for each block of queries (Child et al., "Generating long sequences with sparse
// transformers", 2019), as flex_attention's BlockMask lists them. What no list names is neither read nor computed.
#include "sparse.h"

namespace ai3::inline AI3_LEVEL {
namespace {

int64_t block_sparse_workspace(const AttentionProblem& p) { return sparse_workspace(p, false); }
template <class T>
void attention_block_sparse(const AttentionProblem& p, const AttentionOperands& m, Workspace& workspace) {
  attend_sparse(p, m, listed_blocks(p, m.own), false, workspace);
}

GradientNames block_sparse_gradients(const AttentionProblem&) { return {"block_sparse", "block_sparse"}; }
int64_t block_sparse_backward_workspace(const AttentionProblem& p, const AttentionGradients&) {
  return sparse_backward_workspace(p, false);
}
void block_sparse_backward(const AttentionProblem& p, const AttentionGradients& m, Workspace& workspace) {
  const SparsePattern s = listed_blocks(p, m.own);
  const SparsePart part{&p, &m, &s};
  differentiate_sparse(&part, 1, {}, false, workspace);
}

AI3_ALGORITHM(attention, block_sparse, .accuracy = Accuracy::bounded, .error_bound = 4e-6, .supports = lists_fit,
              .workspace = block_sparse_workspace, .gradients = block_sparse_gradients, .backward = block_sparse_backward,
              .backward_workspace = block_sparse_backward_workspace, .parameters = AI3_BLOCK_SPARSE_PARAMETERS)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

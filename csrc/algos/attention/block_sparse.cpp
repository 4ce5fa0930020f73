// Attention over listed blocks of keys for each block of queries (Child et al., "Generating long sequences with sparse
// transformers", 2019), as flex_attention's BlockMask lists them. What no list names is neither read nor computed.
#include "sparse.h"

namespace ai3::inline AI3_LEVEL {
namespace {

enum Own { partial_counts, partial_indices, full_counts, full_indices, block_size };

bool block_sparse_supports(const AttentionProblem& p, Reason& reason) {
  const Parameters& own = p.parameters;
  if (!own.flag(partial_counts) || !own.flag(partial_indices)) return refuse(reason, "needs kv_num_blocks and kv_indices");
  if (own.flag(full_counts) != own.flag(full_indices))
    return refuse(reason, "needs both of full_kv_num_blocks and full_kv_indices, or neither");
  if (own.whole(block_size) < 1)
    return refuse(reason, "needs block_size from 1, got %lld", static_cast<long long>(own.whole(block_size)));
  return !p.causal || refuse(reason, "takes no is_causal: lists and attn_mask say what is seen");
}
BlockLists lists_of(const Operand& counts, const Operand& indices) {
  if (!counts) return {};
  return {counts.read<int64_t>(),
          indices.read<int64_t>(),
          {stride_of(counts, 3), stride_of(counts, 2), stride_of(counts, 1), stride_of(counts, 0)},
          strides_of(indices, 2)};
}
SparsePattern listed_blocks(const AttentionProblem& p, const Operand* own) {
  SparsePattern s{SparsePattern::Kind::blocks};
  s.partial = lists_of(own[partial_counts], own[partial_indices]), s.full = lists_of(own[full_counts], own[full_indices]);
  s.block = p.parameters.whole(block_size);
  return s;
}

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

AI3_ALGORITHM(attention, block_sparse, .accuracy = Accuracy::bounded, .error_bound = 4e-6, .supports = block_sparse_supports,
              .workspace = block_sparse_workspace, .gradients = block_sparse_gradients, .backward = block_sparse_backward,
              .backward_workspace = block_sparse_backward_workspace,
              .parameters =
                  "Tensor kv_num_blocks, Tensor kv_indices, Tensor? full_kv_num_blocks=None, Tensor? "
                  "full_kv_indices=None, int block_size=128")

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

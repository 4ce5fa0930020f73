// Attention to some of the keys: what block_sparse, longformer and bigbird have in common. The kernels are compiled once
// (sparse.cu) and called by each of them.
#pragma once
#include "../../algos/attention/patterns.h"
#include "../core/host.h"

namespace ai3::inline AI3_LEVEL {

// Parts are computed one after the other, each with operands of its own, and give the rows that are theirs: of longformer its
// ordinary queries and its global ones. Gradients of theirs that are null are not wanted; where parts have their keys, or their
// values, in common, those gradients are one sum.
struct SparsePart {
  const AttentionProblem* p;
  const SparsePattern* s;
};
int64_t sparse_workspace(const SparsePart* parts, int count);
void attend_sparse(const SparsePart* parts, const AttentionOperands* operands, int count, Workspace& workspace);
int64_t sparse_backward_workspace(const SparsePart* parts, const AttentionGradients* gradients, int count);
void differentiate_sparse(const SparsePart* parts, const AttentionGradients* gradients, int count, Workspace& workspace);

// Memory for what each token is, and the launch that says it.
int64_t token_bytes(const AttentionProblem& p);
SparsePattern tokens_of(const AttentionProblem& p, const Operand* own, Workspace& workspace);
// The same of bigbird's lists.
int64_t list_bytes(const AttentionProblem& p);
SparsePattern blocks_listed(const AttentionProblem& p, const Operand* own, Workspace& workspace);

}  // namespace ai3::inline AI3_LEVEL

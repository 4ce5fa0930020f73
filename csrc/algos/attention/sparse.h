// Attention to some of the keys, which are chosen for tiles of queries: what block_sparse, longformer and bigbird have in common.
// The kernel is compiled once (sparse.cpp) and called by each of them.
#pragma once
#include "patterns.h"
#include "visible.h"

namespace ai3::inline AI3_LEVEL {

// Bytes, and the call. `lists`: of patterns that have global tokens.
int64_t sparse_workspace(const AttentionProblem& p, bool lists);
void attend_sparse(const AttentionProblem& p, const AttentionOperands& m, const SparsePattern& s, bool lists,
                   Workspace& workspace);

// Gradients in one pass over the scores, with those of keys and values summed in the accumulator's type for one head at a time:
// heads are what threads share, and memory is that of one head's keys and values for each. Parts are computed one after the
// other, each with operands of its own; what is null is not wanted. Where they have their keys, or their values, in common, the
// gradients of those are one sum.
struct SparsePart {
  const AttentionProblem* p;
  const AttentionGradients* m;
  const SparsePattern* s;
};
struct Common {
  bool keys = false, values = false;
};
int64_t sparse_backward_workspace(const AttentionProblem& p, bool lists);
void differentiate_sparse(const SparsePart* parts, int count, Common common, bool lists, Workspace& workspace);

}  // namespace ai3::inline AI3_LEVEL

// Attention to some of the keys, which are chosen for tiles of queries: what block_sparse, longformer and bigbird have in common.
// The kernel is compiled once (sparse.cpp) and called by each of them.
#pragma once
#include "visible.h"

namespace ai3::inline AI3_LEVEL {

// What a token of longformer is; padded ones see nothing and are not seen.
enum class Token : uint8_t { ordinary, global, padded };

// Lists of blocks for each head and block of queries: so many of `indices`, which are contiguous. Strides of 0 serve all.
struct BlockLists {
  const int64_t *counts = nullptr, *indices = nullptr;
  AttentionStrides counts_at = {}, indices_at = {};
};

struct SparsePattern {
  enum class Kind {
    blocks,  // queries of a block see the blocks of keys that are listed for it, each as often as it is listed
    band,    // query i sees keys from i - half to i + half, and global ones; those that are no ordinary tokens are left out
    globals  // queries that are global see all keys
  } kind;
  BlockLists partial = {}, full = {};  // the call's mask holds in partial blocks; without `counts` there are none
  int64_t block = 0;
  bool ends_see_all = false;  // the first and the last block of queries, whatever is listed
  int64_t half = 0;
  // Of the tokens of batch b, from tokens[b * keys] on, and which of them are global, so many in ascending order.
  const Token* tokens = nullptr;
  const int32_t *globals = nullptr, *global_count = nullptr;
};

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

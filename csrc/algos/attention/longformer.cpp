// Attention within a window, and to and from global tokens (Beltagy et al., "Longformer", 2020): two parts, of the ordinary
// queries, which see their window and the global keys, and of the global ones, which see all, with projections of their own.
#include "sparse.h"

namespace ai3::inline AI3_LEVEL {
namespace {

// Memory for what each token is, and the lists of global ones.
int64_t token_bytes(const AttentionProblem& p) {
  const int64_t batches = checked_mul(p.outer, p.batch), all = checked_mul(batches, p.keys);
  return checked_add(checked_add(workspace_bytes<Token>(all), workspace_bytes<int32_t>(all)), workspace_bytes<int32_t>(batches));
}
SparsePattern tokens_of(const AttentionProblem& p, const Operand* own, Workspace& workspace) {
  const int64_t batches = p.outer * p.batch, all = batches * p.keys;
  Token* const tokens = workspace.take<Token>(all);
  int32_t *const globals = workspace.take<int32_t>(all), *const counts = workspace.take<int32_t>(batches);
  const TokenKinds kinds(p, own);
  for (int64_t b = 0; b < batches; b++) {
    counts[b] = 0;
    for (int64_t n = 0; n < p.keys; n++) {
      tokens[b * p.keys + n] = kinds(b, n);
      if (tokens[b * p.keys + n] == Token::global) globals[b * p.keys + counts[b]++] = static_cast<int32_t>(n);
    }
  }
  SparsePattern s = band_of(p);
  s.tokens = tokens, s.globals = globals, s.global_count = counts;
  return s;
}
int64_t longformer_workspace(const AttentionProblem& p) {
  return checked_add(token_bytes(p), checked_mul(2, sparse_workspace(p, true)));
}
template <class T>
void attention_longformer(const AttentionProblem& p, const AttentionOperands& m, Workspace& workspace) {
  SparsePattern s = tokens_of(p, m.own, workspace);
  attend_sparse(p, m, s, true, workspace);
  AttentionProblem global = p;
  AttentionOperands of_global = m;
  set_global(global, of_global);
  s.kind = SparsePattern::Kind::globals;
  attend_sparse(global, of_global, s, true, workspace);
}

GradientNames longformer_gradients(const AttentionProblem&) { return {"longformer", "longformer"}; }
int64_t longformer_backward_workspace(const AttentionProblem& p, const AttentionGradients&) {
  return checked_add(token_bytes(p), sparse_backward_workspace(p, true));
}
void longformer_backward(const AttentionProblem& p, const AttentionGradients& m, Workspace& workspace) {
  const SparsePattern ordinary = tokens_of(p, m.own, workspace);
  SparsePattern s = ordinary;
  s.kind = SparsePattern::Kind::globals;
  AttentionProblem global = p;
  AttentionGradients of_global = m;
  set_global(global, of_global);
  set_global_gradients(of_global);
  const SparsePart parts[] = {{&p, &m, &ordinary}, {&global, &of_global, &s}};
  differentiate_sparse(parts, 2, {.keys = !m.own[Longformer::global_key], .values = !m.own[Longformer::global_value]}, true,
                       workspace);
}

AI3_ALGORITHM(attention, longformer, .accuracy = Accuracy::approximate, .supports = longformer_fits,
              .workspace = longformer_workspace, .gradients = longformer_gradients, .backward = longformer_backward,
              .backward_workspace = longformer_backward_workspace, .parameters = AI3_LONGFORMER_PARAMETERS)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

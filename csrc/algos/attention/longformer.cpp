// Attention within a window, and to and from global tokens (Beltagy et al., "Longformer", 2020): two parts, of the ordinary
// queries, which see their window and the global keys, and of the global ones, which see all, with projections of their own.
#include "sparse.h"

namespace ai3::inline AI3_LEVEL {
namespace {

enum Own { window, global_tokens, global_mask, global_query, global_key, global_value, key_padding };

bool longformer_supports(const AttentionProblem& p, Reason& reason) {
  const Parameters& own = p.parameters;
  const auto wide = static_cast<long long>(own.whole(window)), tokens = static_cast<long long>(own.whole(global_tokens));
  if (wide < 0 || wide % 2) return refuse(reason, "needs an even window from 0, got %lld", wide);
  if (tokens < 0) return refuse(reason, "needs global_tokens from 0, got %lld", tokens);
  if (tokens > 0 && own.flag(global_mask)) return refuse(reason, "needs global_tokens or global_mask, got both");
  if (p.queries >= 0 && p.keys >= 0 && p.queries != p.keys)
    return refuse(reason, "needs as many queries as keys, got %lld and %lld", static_cast<long long>(p.queries),
                  static_cast<long long>(p.keys));
  if (p.keys >= int64_t{1} << 31) return refuse(reason, "needs fewer than 2^31 keys");
  return (!p.causal && !p.has_mask) || refuse(reason, "takes no attn_mask and no is_causal, but key_padding");
}

// Memory for what each token is, and the lists of global ones.
int64_t token_bytes(const AttentionProblem& p) {
  const int64_t batches = checked_mul(p.outer, p.batch), all = checked_mul(batches, p.keys);
  return checked_add(checked_add(workspace_bytes<Token>(all), workspace_bytes<int32_t>(all)), workspace_bytes<int32_t>(batches));
}
SparsePattern tokens_of(const AttentionProblem& p, const Operand* own, Workspace& workspace) {
  const int64_t batches = p.outer * p.batch, all = batches * p.keys, first = p.parameters.whole(global_tokens);
  Token* const tokens = workspace.take<Token>(all);
  int32_t *const globals = workspace.take<int32_t>(all), *const counts = workspace.take<int32_t>(batches);
  auto at = [&](const Operand& t, int64_t outer, int64_t batch, int64_t n) {
    return t && t.read<uint8_t>()[outer * stride_of(t, 2) + batch * stride_of(t, 1) + n * stride_of(t, 0)];
  };
  for (int64_t b = 0; b < batches; b++) {
    counts[b] = 0;
    for (int64_t n = 0; n < p.keys; n++) {
      const int64_t outer = b / p.batch, batch = b % p.batch;
      const bool global = n < first || at(own[global_mask], outer, batch, n);
      tokens[b * p.keys + n] = at(own[key_padding], outer, batch, n) ? Token::padded : global ? Token::global : Token::ordinary;
      if (tokens[b * p.keys + n] == Token::global) globals[b * p.keys + counts[b]++] = static_cast<int32_t>(n);
    }
  }
  SparsePattern s{SparsePattern::Kind::band};
  s.half = p.parameters.whole(window) / 2, s.tokens = tokens, s.globals = globals, s.global_count = counts;
  return s;
}
// The problem and, of operands or gradients, the tensors of the global queries.
template <class Operands>
void set_global(AttentionProblem& p, Operands& m) {
  auto set = [&](Own i, Operand& t, AttentionStrides& strides) {
    if (m.own[i]) t = m.own[i], strides = strides_of(m.own[i], 2);
  };
  set(global_query, m.query, p.query_at), set(global_key, m.key, p.key_at), set(global_value, m.value, p.value_at);
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
  auto set = [&](Own i, Operand& grad) {
    if (m.own[i]) grad = m.grad_own[i];
  };
  set(global_query, of_global.grad_query), set(global_key, of_global.grad_key), set(global_value, of_global.grad_value);
  const SparsePart parts[] = {{&p, &m, &ordinary}, {&global, &of_global, &s}};
  differentiate_sparse(parts, 2, {.keys = !m.own[global_key], .values = !m.own[global_value]}, true, workspace);
}

AI3_ALGORITHM(attention, longformer, .accuracy = Accuracy::approximate, .supports = longformer_supports,
              .workspace = longformer_workspace, .gradients = longformer_gradients, .backward = longformer_backward,
              .backward_workspace = longformer_backward_workspace,
              .parameters =
                  "int window=512, int global_tokens=0, Tensor? global_mask=None, Tensor? global_query=None, Tensor? "
                  "global_key=None, Tensor? global_value=None, Tensor? key_padding=None")

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

// Attention of blocks (Zaheer et al., "Big Bird", 2020): a block of queries sees the first and the last block of keys, its own
// one with both neighbours, and random ones; the first and the last block of queries see all keys.
#include "sparse.h"

namespace ai3::inline AI3_LEVEL {
namespace {

enum Own { block_size, random_blocks, seed, random_indices, random_plan };
enum Plan { counter, hf_eval };

bool bigbird_supports(const AttentionProblem& p, Reason& reason) {
  const Parameters& own = p.parameters;
  const auto block = static_cast<long long>(own.whole(block_size)), random = static_cast<long long>(own.whole(random_blocks));
  if (block < 1) return refuse(reason, "needs block_size from 1, got %lld", block);
  if (random < 0 || random > 1024) return refuse(reason, "needs random_blocks from 0 to 1024, got %lld", random);
  if (own.flag(random_indices) && own.whole(random_plan) != counter)
    return refuse(reason, "needs random_indices or random=\"hf_eval\", got both");
  if (p.queries >= 0 && p.keys >= 0 && p.queries != p.keys)
    return refuse(reason, "needs as many queries as keys, got %lld and %lld", static_cast<long long>(p.queries),
                  static_cast<long long>(p.keys));
  return !p.causal || refuse(reason, "takes no is_causal");
}

int64_t blocks_of(const AttentionProblem& p) { return ceil_div(larger(p.keys, 1), p.parameters.whole(block_size)); }
// How many are listed for a block of queries, at most.
int64_t most_listed(const AttentionProblem& p) { return 5 + p.parameters.whole(random_blocks); }
int64_t list_bytes(const AttentionProblem& p) {
  const int64_t rows = checked_mul(p.heads, blocks_of(p));
  return checked_add(workspace_bytes<int64_t>(rows), workspace_bytes<int64_t>(checked_mul(rows, most_listed(p))));
}

SparsePattern blocks_listed(const AttentionProblem& p, const Operand* own, Workspace& workspace) {
  const Parameters& o = p.parameters;
  const int64_t n = blocks_of(p), most = most_listed(p), random = o.whole(random_blocks), block = o.whole(block_size);
  int64_t *const counts = workspace.take<int64_t>(p.heads * n), *const indices = workspace.take<int64_t>(p.heads * n * most);
  const Operand& given = own[random_indices];
  parallel_for(p.threads, p.heads * n, [&](int64_t row, int) {
    const int64_t head = row / n, i = row % n;
    int64_t *const list = indices + row * most, count = 0;
    auto add_once = [&](int64_t j) {
      for (int64_t k = 0; k < count; k++)
        if (list[k] == j) return false;
      return list[count++] = j, true;
    };
    if (i > 0 && i < n - 1) {
      add_once(0);
      for (int64_t j = i - 1; j <= i + 1; j++) add_once(j);
      add_once(n - 1);
      if (given) {
        for (int64_t k = 0; k < random; k++)
          list[count++] =
              given.read<int64_t>()[head * stride_of(given, 2) + (i - 1) * stride_of(given, 1) + k * stride_of(given, 0)];
      } else if (o.whole(random_plan) == hf_eval) {
        for (int64_t k = 0; k < random; k++) list[count++] = 0;
      } else {
        const uint64_t state = random_bits(random_bits(static_cast<uint64_t>(o.whole(seed)), head), i);
        const int64_t wanted = smaller(random, n - count);
        for (int64_t drawn = 0, k = 0; drawn < wanted; k++)
          drawn += add_once(static_cast<int64_t>((random_bits(state, k) >> 32) * static_cast<uint64_t>(n) >> 32));
      }
    }
    counts[row] = count;
  });
  SparsePattern s{SparsePattern::Kind::blocks};
  s.block = block, s.ends_see_all = true;
  s.partial = {counts, indices, {0, 0, n, 1}, {0, 0, n * most, most}};
  // As transformers, which computes attention in full where it would list nearly all.
  if (o.whole(random_plan) == hf_eval && p.queries <= (5 + 2 * random) * block) s.block = larger(p.queries, 1);
  return s;
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

AI3_ALGORITHM(attention, bigbird, .accuracy = Accuracy::approximate, .supports = bigbird_supports, .workspace = bigbird_workspace,
              .gradients = bigbird_gradients, .backward = bigbird_backward, .backward_workspace = bigbird_backward_workspace,
              .parameters =
                  "int block_size=64, int random_blocks=3, int seed=0, Tensor? random_indices=None, "
                  "str(counter|hf_eval) random=counter")

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

// The patterns of sparse attention, as the kernels of the CPU and of CUDA read them: which keys queries see, what calls say of
// it, and what is refused.
#pragma once
#include "problem.h"

namespace ai3 {

// What a token of longformer is; padded ones see nothing and are not seen.
enum class Token : uint8_t { ordinary, global, padded };

// Lists of blocks for each head and block of queries: so many of `indices`, which are contiguous. Strides of 0 serve all.
struct BlockLists {
  const int64_t *counts = nullptr, *indices = nullptr;
  AttentionStrides counts_at = {}, indices_at = {};
  int64_t most = 0;  // that a list has room for
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
  // Of the tokens of batch b, from tokens[b * keys] on. The CPU's kernels read which of them are global from a list, too: so many
  // in ascending order.
  const Token* tokens = nullptr;
  const int32_t *globals = nullptr, *global_count = nullptr;
};

// The parameters of each, by their places; what `supports` asks of them. Static: records hold the addresses, and levels must not
// share one copy.
struct BlockSparse {
  enum Place { partial_counts, partial_indices, full_counts, full_indices, block_size };
};
#define AI3_BLOCK_SPARSE_PARAMETERS \
  "Tensor kv_num_blocks, Tensor kv_indices, Tensor? full_kv_num_blocks=None, Tensor? full_kv_indices=None, int block_size=128"
AI3_INLINE static bool lists_fit(const AttentionProblem& p, Reason& reason) {
  const Parameters& own = p.parameters;
  if (!own.flag(BlockSparse::partial_counts) || !own.flag(BlockSparse::partial_indices))
    return refuse(reason, "needs kv_num_blocks and kv_indices");
  if (own.flag(BlockSparse::full_counts) != own.flag(BlockSparse::full_indices))
    return refuse(reason, "needs both of full_kv_num_blocks and full_kv_indices, or neither");
  if (own.whole(BlockSparse::block_size) < 1)
    return refuse(reason, "needs block_size from 1, got %lld", static_cast<long long>(own.whole(BlockSparse::block_size)));
  return !p.causal || refuse(reason, "takes no is_causal: lists and attn_mask say what is seen");
}
AI3_INLINE BlockLists lists_of(const Operand& counts, const Operand& indices) {
  if (!counts) return {};
  return {counts.read<int64_t>(),
          indices.read<int64_t>(),
          {stride_of(counts, 3), stride_of(counts, 2), stride_of(counts, 1), stride_of(counts, 0)},
          strides_of(indices, 2),
          indices.sizes[indices.rank - 1]};
}
AI3_INLINE SparsePattern listed_blocks(const AttentionProblem& p, const Operand* own) {
  SparsePattern s{SparsePattern::Kind::blocks};
  s.partial = lists_of(own[BlockSparse::partial_counts], own[BlockSparse::partial_indices]);
  s.full = lists_of(own[BlockSparse::full_counts], own[BlockSparse::full_indices]);
  s.block = p.parameters.whole(BlockSparse::block_size);
  return s;
}

struct Longformer {
  enum Place { window, global_tokens, global_mask, global_query, global_key, global_value, key_padding };
};
#define AI3_LONGFORMER_PARAMETERS                                                                                               \
  "int window=512, int global_tokens=0, Tensor? global_mask=None, Tensor? global_query=None, Tensor? global_key=None, Tensor? " \
  "global_value=None, Tensor? key_padding=None"
AI3_INLINE static bool longformer_fits(const AttentionProblem& p, Reason& reason) {
  const Parameters& own = p.parameters;
  const auto wide = static_cast<long long>(own.whole(Longformer::window)),
             tokens = static_cast<long long>(own.whole(Longformer::global_tokens));
  if (wide < 0 || wide % 2) return refuse(reason, "needs an even window from 0, got %lld", wide);
  if (tokens < 0) return refuse(reason, "needs global_tokens from 0, got %lld", tokens);
  if (tokens > 0 && own.flag(Longformer::global_mask)) return refuse(reason, "needs global_tokens or global_mask, got both");
  if (p.queries >= 0 && p.keys >= 0 && p.queries != p.keys)
    return refuse(reason, "needs as many queries as keys, got %lld and %lld", static_cast<long long>(p.queries),
                  static_cast<long long>(p.keys));
  if (p.keys >= int64_t{1} << 31) return refuse(reason, "needs fewer than 2^31 keys");
  return (!p.causal && !p.has_mask) || refuse(reason, "takes no attn_mask and no is_causal, but key_padding");
}
// The ordinary queries' pattern, without what each token is.
AI3_INLINE SparsePattern band_of(const AttentionProblem& p) {
  SparsePattern s{SparsePattern::Kind::band};
  s.half = p.parameters.whole(Longformer::window) / 2;
  return s;
}
// What each token is, from the call's tensors.
struct TokenKinds {
  int64_t batch, first;
  const uint8_t *global, *padding;
  AttentionStrides global_at, padding_at;
  AI3_INLINE TokenKinds(const AttentionProblem& p, const Operand* own)
      : batch(p.batch),
        first(p.parameters.whole(Longformer::global_tokens)),
        global(own[Longformer::global_mask].read<uint8_t>()),
        padding(own[Longformer::key_padding].read<uint8_t>()),
        global_at(of_tokens(own[Longformer::global_mask])),
        padding_at(of_tokens(own[Longformer::key_padding])) {}
  AI3_INLINE static AttentionStrides of_tokens(const Operand& t) {
    return {stride_of(t, 2), stride_of(t, 1), 0, stride_of(t, 0)};
  }
  AI3_INLINE constexpr bool holds(const uint8_t* flags, const AttentionStrides& at, int64_t b, int64_t n) const {
    return flags && flags[b / batch * at.outer + b % batch * at.batch + n * at.row];
  }
  // Of token n of one of all batches.
  AI3_INLINE constexpr Token operator()(int64_t b, int64_t n) const {
    if (holds(padding, padding_at, b, n)) return Token::padded;
    return n < first || holds(global, global_at, b, n) ? Token::global : Token::ordinary;
  }
};
// The problem and, of operands or gradients, the tensors of the global queries.
template <class Operands>
AI3_INLINE void set_global(AttentionProblem& p, Operands& m) {
  auto set = [&](Longformer::Place i, Operand& t, AttentionStrides& strides) {
    if (m.own[i]) t = m.own[i], strides = strides_of(m.own[i], 2);
  };
  set(Longformer::global_query, m.query, p.query_at), set(Longformer::global_key, m.key, p.key_at);
  set(Longformer::global_value, m.value, p.value_at);
}
// And those that their gradients go to.
AI3_INLINE void set_global_gradients(AttentionGradients& m) {
  auto set = [&](Longformer::Place i, Operand& grad) {
    if (m.own[i]) grad = m.grad_own[i];
  };
  set(Longformer::global_query, m.grad_query), set(Longformer::global_key, m.grad_key);
  set(Longformer::global_value, m.grad_value);
}

struct BigBird {
  enum Place { block_size, random_blocks, seed, random_indices, random_plan };
  enum Plan { counter, hf_eval };
};
#define AI3_BIGBIRD_PARAMETERS \
  "int block_size=64, int random_blocks=3, int seed=0, Tensor? random_indices=None, str(counter|hf_eval) random=counter"
AI3_INLINE static bool bigbird_fits(const AttentionProblem& p, Reason& reason) {
  const Parameters& own = p.parameters;
  const auto block = static_cast<long long>(own.whole(BigBird::block_size)),
             random = static_cast<long long>(own.whole(BigBird::random_blocks));
  if (block < 1) return refuse(reason, "needs block_size from 1, got %lld", block);
  if (random < 0 || random > 1024) return refuse(reason, "needs random_blocks from 0 to 1024, got %lld", random);
  if (own.flag(BigBird::random_indices) && own.whole(BigBird::random_plan) != BigBird::counter)
    return refuse(reason, "needs random_indices or random=\"hf_eval\", got both");
  if (p.queries >= 0 && p.keys >= 0 && p.queries != p.keys)
    return refuse(reason, "needs as many queries as keys, got %lld and %lld", static_cast<long long>(p.queries),
                  static_cast<long long>(p.keys));
  return !p.causal || refuse(reason, "takes no is_causal");
}
// What is listed for the blocks of queries of each head, but for the first and the last, which see all.
struct BigBirdLists {
  int64_t heads, blocks, random, most;  // `most`: of one block's
  bool eval;
  uint64_t seed;
  const int64_t* given;
  int64_t given_head, given_row, given_each;
  AI3_INLINE BigBirdLists(const AttentionProblem& p, const Operand* own)
      : heads(p.heads),
        blocks(ceil_div(p.keys > 1 ? p.keys : 1, p.parameters.whole(BigBird::block_size))),
        random(p.parameters.whole(BigBird::random_blocks)),
        most(5 + random),
        eval(p.parameters.whole(BigBird::random_plan) == BigBird::hf_eval),
        seed(static_cast<uint64_t>(p.parameters.whole(BigBird::seed))),
        given(nullptr),
        given_head(0),
        given_row(0),
        given_each(0) {
    if (!own || !own[BigBird::random_indices]) return;
    const Operand& t = own[BigBird::random_indices];
    given = t.read<int64_t>(), given_head = stride_of(t, 2), given_row = stride_of(t, 1), given_each = stride_of(t, 0);
  }
  AI3_INLINE int64_t rows() const { return checked_mul(heads, blocks); }
  AI3_INLINE int64_t indices() const { return checked_mul(rows(), most); }
  AI3_INLINE static constexpr bool add_once(int64_t* list, int64_t& count, int64_t j) {
    for (int64_t k = 0; k < count; k++)
      if (list[k] == j) return false;
    list[count++] = j;
    return true;
  }
  // Those of row `head * blocks + i`: how many.
  AI3_INLINE constexpr int64_t list(int64_t row, int64_t* to) const {
    const int64_t head = row / blocks, i = row % blocks;
    int64_t count = 0;
    if (i == 0 || i == blocks - 1) return 0;
    add_once(to, count, 0);
    for (int64_t j = i - 1; j <= i + 1; j++) add_once(to, count, j);
    add_once(to, count, blocks - 1);
    if (given) {
      for (int64_t k = 0; k < random; k++) to[count++] = given[head * given_head + (i - 1) * given_row + k * given_each];
    } else if (eval) {
      for (int64_t k = 0; k < random; k++) to[count++] = 0;
    } else {
      const uint64_t state = random_bits(random_bits(seed, head), i);
      const int64_t wanted = random < blocks - count ? random : blocks - count;
      for (int64_t drawn = 0, k = 0; drawn < wanted; k++)
        drawn += add_once(to, count, static_cast<int64_t>((random_bits(state, k) >> 32) * static_cast<uint64_t>(blocks) >> 32));
    }
    return count;
  }
  AI3_INLINE SparsePattern pattern(const AttentionProblem& p, const int64_t* counts, const int64_t* lists) const {
    SparsePattern s{SparsePattern::Kind::blocks};
    s.block = p.parameters.whole(BigBird::block_size), s.ends_see_all = true;
    s.partial = {counts, lists, {0, 0, blocks, 1}, {0, 0, blocks * most, most}, most};
    // As transformers, which computes attention in full where it would list nearly all.
    if (eval && p.queries <= (5 + 2 * random) * s.block) s.block = p.queries > 1 ? p.queries : 1;
    return s;
  }
};

}  // namespace ai3

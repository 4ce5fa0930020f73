// Flash attention (Dao, "FlashAttention-2", 2023): PyTorch's kernels of that name, for types of 16 bits. What they do not take,
// masks and what is added to scores, is refused: `math` computes it.
#include "../core/host.h"
#include "../core/pytorch.h"

namespace ai3::inline AI3_LEVEL {
namespace {

constexpr int64_t kGrid = 65535;  // blocks of a grid's second and third dimension

bool flash_supports(const AttentionProblem& p, Reason& reason) {
  if (!device_supports(p, reason) || !parameters_fit(p, reason)) return false;
  if (p.dtype != DType::bf16 && p.dtype != DType::f16)
    return refuse(reason, "needs bfloat16 or float16 on CUDA, got %s", name_of(p.dtype));
  // Its kernels hide keys before they scale scores, and take the largest of those for the largest of the scaled ones.
  if (!(p.scale > 0 && p.scale < __builtin_inf())) return refuse(reason, "needs scale above 0 on CUDA, got %g", p.scale);
  if (p.has_mask) return refuse(reason, "takes no attn_mask on CUDA");
  if (p.dropout > 0) return refuse(reason, "takes no dropout_p on CUDA");
  for (const Dense::Place place : {Dense::sinks, Dense::alibi_slopes, Dense::key_lengths, Dense::rel_h})
    if (p.parameters.flag(place)) return refuse(reason, "takes no sinks, alibi_slopes, key_lengths, rel_h and rel_w on CUDA");
  if (p.softcap != 0) return refuse(reason, "takes no softcap on CUDA");
  const auto size = static_cast<long long>(p.size), value_size = static_cast<long long>(p.value_size);
  if (size >= 0 && value_size >= 0 && (size != value_size || size % 8 != 0 || size < 8 || size > 256))
    return refuse(reason, "needs one size of query, key and value on CUDA, a multiple of 8 up to 256, got %lld and %lld", size,
                  value_size);
  const int capability = current_capability();
  if (size > 192 && (capability == 86 || capability == 89 || capability >= 120))
    return refuse(reason, "needs sizes up to 192 on GPUs of compute capability %d.%d, got %lld", capability / 10, capability % 10,
                  size);
  if (p.batch > kGrid || p.heads > kGrid)
    return refuse(reason, "needs at most %lld batches and heads on CUDA, got %lld and %lld", static_cast<long long>(kGrid),
                  static_cast<long long>(p.batch), static_cast<long long>(p.heads));
  // A window, and a diagonal, end at the last key of the last query, with as many of both at those of one number.
  const bool hides = p.causal || p.lower_right || p.window_left >= 0 || p.window_right >= 0;
  const auto queries = static_cast<long long>(p.queries), keys = static_cast<long long>(p.keys);
  if (queries < 0 || keys < 0) return true;
  if (keys == 0) return refuse(reason, "needs keys on CUDA");
  if (hides && queries != keys && !(p.lower_right && queries < keys))
    return refuse(reason, "needs as many queries as keys, or fewer with causal_lower_right, on CUDA, got %lld and %lld", queries,
                  keys);
  return true;
}

template <class T>
void attention_flash(const AttentionProblem& p, const AttentionOperands& m, Workspace&) {
  pytorch_flash_attention(p, m);
}
GradientNames flash_gradients(const AttentionProblem&) { return {"flash", "flash"}; }
void flash_backward(const AttentionProblem& p, const AttentionGradients& m, Workspace&) {
  pytorch_flash_attention_backward(p, m);
}
int64_t flash_backward_workspace(const AttentionProblem&, const AttentionGradients&) { return 0; }

AI3_ALGORITHM(attention, flash, .accuracy = Accuracy::bounded, .error_bound = 4e-6, .supports = flash_supports,
              .gradients = flash_gradients, .backward = flash_backward, .backward_workspace = flash_backward_workspace,
              .parameters = AI3_ATTENTION_PARAMETERS)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

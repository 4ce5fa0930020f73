// PyTorch's flash attention for attention/flash.cpp, through the dispatcher: aten::_flash_attention_forward and its backward,
// whose results are tensors alone (those of _scaled_dot_product_flash_attention are numbers as well, which the stable dispatcher
// does not hand over).
#include <cuda_runtime.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <utility>

#include "../ops/tensor/stable.h"
#include "core/pytorch.h"

namespace {
using namespace ai3;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

ScalarType scalar_type(DType dtype) {
  if (dtype != DType::bf16 && dtype != DType::f16) throw std::runtime_error("ai3: attention_flash failed: not a type of 16 bits");
  return dtype == DType::bf16 ? ScalarType::BFloat16 : ScalarType::Half;
}
torch::stable::Device current_device() {
  int index = 0;
  if (cudaGetDevice(&index) != cudaSuccess) throw std::runtime_error("ai3: attention_flash failed: no current device");
  return {torch::headeronly::DeviceType::CUDA, static_cast<torch::stable::DeviceIndex>(index)};
}
Tensor empty(std::initializer_list<int64_t> sizes, ScalarType type) {
  return torch::stable::empty(sizes, type, std::nullopt, current_device());
}
// One outer batch of an operand as (batch, rows, heads, size), which is how PyTorch's kernels want it.
Tensor view(const void* data, ScalarType type, int64_t outer, const AttentionStrides& at, int64_t batch, int64_t rows,
            int64_t heads, int64_t size) {
  const std::array<int64_t, 4> sizes{batch, rows, heads, size}, strides{at.batch, at.row, at.head, 1};
  return torch::stable::from_blob(static_cast<char*>(const_cast<void*>(data)) + 2 * outer * at.outer, sizes, strides,
                                  current_device(), type);
}
// The same for reading, which they do 16 bytes at a time: a copy where rows do not begin at multiples of those.
Tensor read(const void* data, ScalarType type, int64_t outer, const AttentionStrides& at, int64_t batch, int64_t rows,
            int64_t heads, int64_t size) {
  const Tensor t = view(data, type, outer, at, batch, rows, heads, size);
  constexpr int64_t kElements = 8;
  const bool whole = reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0 && (batch == 1 || at.batch % kElements == 0) &&
                     (rows == 1 || at.row % kElements == 0) && (heads == 1 || at.head % kElements == 0);
  if (whole) return t;
  Tensor copy = empty({batch, rows, heads, size}, type);
  torch::stable::copy_(copy, t);
  return copy;
}
Tensor rows_of_sums(const Operand& logsumexp, const AttentionProblem& p, int64_t outer) {
  const std::array<int64_t, 3> sizes{p.batch, p.heads, p.queries}, strides{p.heads * p.queries, p.queries, 1};
  return torch::stable::from_blob(const_cast<float*>(logsumexp.read<float>()) + outer * p.batch * p.heads * p.queries, sizes,
                                  strides, current_device(), ScalarType::Float);
}
Tensor undefined() {
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_new_uninitialized_tensor(&handle));
  return Tensor(handle);
}

// Calls an operator of PyTorch's with more room than it has arguments: those that a later version has added are optional, and
// what is 0 there is none.
class Call {
 public:
  template <class... A>
  explicit Call(const char* name, const A&... arguments) {
    static_assert(sizeof...(A) < kRoom);
    size_t i = 0;
    ((stack_[i++] = ops::to_stack(arguments)), ...);
    STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, "", stack_.data(), TORCH_ABI_VERSION));
  }
  // Each once, in order: the stack owns them.
  Tensor take() { return ops::from_stack<Tensor>(stack_[next_++]); }

 private:
  static constexpr size_t kRoom = 32;
  std::array<StableIValue, kRoom> stack_{};
  size_t next_ = 0;
};
// PyTorch takes 32 bits of it; none hides nothing.
std::optional<int64_t> side(const AttentionProblem& p, int64_t window) {
  return window < 0 || window >= std::max(p.queries, p.keys) ? std::nullopt : std::optional(window);
}

AttentionStrides dense(int64_t batch, int64_t heads, int64_t rows, int64_t size) {
  return {batch * heads * rows * size, heads * rows * size, rows * size, size};
}

}  // namespace

void ai3::pytorch_flash_attention(const AttentionProblem& p, const AttentionOperands& m) {
  const ScalarType type = scalar_type(p.dtype);
  for (int64_t o = 0; o < p.outer; o++) {
    Call call("aten::_flash_attention_forward", read(m.query.data, type, o, p.query_at, p.batch, p.queries, p.heads, p.size),
              read(m.key.data, type, o, p.key_at, p.batch, p.keys, p.kv_heads, p.size),
              read(m.value.data, type, o, p.value_at, p.batch, p.keys, p.kv_heads, p.value_size), std::optional<Tensor>(),
              std::optional<Tensor>(), p.queries, p.keys, 0.0, p.causal || p.lower_right, false, std::optional<double>(p.scale),
              side(p, p.window_left), side(p, p.window_right));
    const Tensor output = call.take(), logsumexp = call.take(), state = call.take(), unused = call.take(), weights = call.take();
    Tensor to = view(m.output.data, type, o, p.output_at, p.batch, p.queries, p.heads, p.value_size);
    torch::stable::copy_(to, output);
    if (!m.logsumexp) continue;
    Tensor sums = rows_of_sums(m.logsumexp, p, o);
    torch::stable::copy_(sums, logsumexp);
  }
}

void ai3::pytorch_flash_attention_backward(const AttentionProblem& p, const AttentionGradients& m) {
  const ScalarType type = scalar_type(p.dtype);
  for (int64_t o = 0; o < p.outer; o++) {
    auto of_queries = [&](const Operand& t, const AttentionStrides& at, int64_t size) {
      return read(t.data, type, o, at, p.batch, p.queries, p.heads, size);
    };
    auto of_keys = [&](const Operand& t, const AttentionStrides& at, int64_t size) {
      return read(t.data, type, o, at, p.batch, p.keys, p.kv_heads, size);
    };
    Call call("aten::_flash_attention_backward", of_queries(m.grad_output, p.output_at, p.value_size),
              of_queries(m.query, p.query_at, p.size), of_keys(m.key, p.key_at, p.size),
              of_keys(m.value, p.value_at, p.value_size), of_queries(m.output, p.output_at, p.value_size),
              rows_of_sums(m.logsumexp, p, o), undefined(), undefined(), p.queries, p.keys, 0.0, p.causal || p.lower_right,
              empty({2}, ScalarType::UInt64), empty({}, ScalarType::UInt64), std::optional<double>(p.scale),
              side(p, p.window_left), side(p, p.window_right));
    const std::pair<const Operand*, bool> all[] = {{&m.grad_query, true}, {&m.grad_key, false}, {&m.grad_value, false}};
    for (const auto& [to, queries] : all) {
      const Tensor made = call.take();
      if (!*to) continue;
      const int64_t rows = queries ? p.queries : p.keys, heads = queries ? p.heads : p.kv_heads;
      Tensor gradient = view(to->data, type, o, dense(p.batch, heads, rows, p.size), p.batch, rows, heads, p.size);
      torch::stable::copy_(gradient, made);
    }
  }
}

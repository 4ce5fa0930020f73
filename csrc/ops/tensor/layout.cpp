// Tensors made, and turned between NCHW and NHWC.
#include "layout.h"

#include <algorithm>
#include <cstdlib>

#include "../prepare/passes.h"
#include "../prepare/run.h"

namespace ai3::ops {

// Of these sizes what is fresh from the system comes in huge pages (docs/decisions/memory.md).
constexpr int64_t kHugeFrom = int64_t{1} << 22, kHugeTo = int64_t{1} << 28;

namespace {

// On the CPU. As PyTorch's does, without the dispatcher, which takes longer than a small kernel.
Tensor empty_strided(const Sizes& sizes, const Sizes& strides, ScalarType dtype, int64_t bytes) {
  // What the system will not give is refused here: PyTorch would print where it stood.
  if (bytes >= int64_t{1} << 28) {
    void* const attempt = std::malloc(static_cast<size_t>(bytes));
    if (!attempt) throw NotEnoughMemory(bytes);
    std::free(attempt);
  }
  AtenTensorHandle made;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                                                         from_stack<int32_t>(to_stack(dtype)), aoti_torch_device_type_cpu(), 0,
                                                         &made));
  Tensor result(made);
  if (bytes >= kHugeFrom && bytes < kHugeTo) ask_for_huge_pages(result.const_data_ptr(), bytes);
  return result;
}

}  // namespace

Tensor empty(const Sizes& sizes, ScalarType dtype, const Tensor& like, bool channels_last) {
  if (!like.is_cpu())
    return torch::stable::empty(sizes, dtype, std::nullopt, like.device(), std::nullopt,
                                channels_last ? MemoryFormat::ChannelsLast : MemoryFormat::Contiguous);
  const size_t rank = sizes.size();
  Sizes strides(rank);
  int64_t count = 1;
  for (size_t i = 0; i < rank; i++) {
    constexpr size_t channels_last_order[] = {1, 3, 2, 0};
    const size_t d = channels_last ? channels_last_order[i] : rank - 1 - i;
    strides[d] = count;
    count = checked_mul(count, std::max<int64_t>(sizes[d], 1));
  }
  if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) count = 0;
  return empty_strided(sizes, strides, dtype,
                       checked_mul(count, dtype == ScalarType::Byte ? 1 : static_cast<int64_t>(like.element_size())));
}

Tensor empty_bytes(int64_t bytes) { return empty_strided({bytes}, {1}, ScalarType::Byte, bytes); }

Tensor empty_as(const Tensor& t) {
  const bool gapless = is_contiguous(t) || (t.dim() == 4 && is_dense(t, true));
  if (!t.is_cpu() || !gapless) return torch::stable::empty_like(t);
  return empty_strided(sizes_of(t), Sizes(t.strides().begin(), t.strides().end()), t.scalar_type(),
                       t.numel() * static_cast<int64_t>(t.element_size()));
}

// Between NCHW and NHWC by the pass of programs, which turns squares of elements in registers: ATen's copy of a 3x3 kernel's
// gradients took longer than the kernel that computed them.
Tensor copied_to(const Tensor& t, bool channels_last) {
  const std::optional<DType> dtype = known_dtype(t);
  if (!t.is_cpu() || !dtype || t.numel() == 0 || !is_dense(t, !channels_last))
    return torch::stable::contiguous(t, channels_last ? MemoryFormat::ChannelsLast : MemoryFormat::Contiguous);
  Tensor to = empty(sizes_of(t), t.scalar_type(), t, channels_last);
  CopyProblem p{*dtype,
                threads(),
                t.size(0),
                t.size(1),
                t.size(2),
                t.size(3),
                dense_strides(t.size(1), t.size(2), t.size(3), !channels_last),
                dense_strides(t.size(1), t.size(2), t.size(3), channels_last)};
  join_rows(p);
  passes().copy(p, {t.const_data_ptr(), to.mutable_data_ptr()});
  return to;
}

}  // namespace ai3::ops

// What PyTorch's oneDNN computes in on this processor.
#pragma once
#include "tensors.h"

namespace ai3::ops {

inline constexpr uint32_t kOneDnnDtypes = dtype_bit(DType::f32) | dtype_bit(DType::bf16) | dtype_bit(DType::f16);

// No where PyTorch has no such operator: `supports` must answer, not throw.
inline bool mkldnn_says(const char* question) {
  StableIValue answer = 0;
  return torch_call_dispatcher(question, "", &answer, TORCH_ABI_VERSION) == 0 && from_stack<bool>(answer);
}

// What oneDNN reorders a weight of `filters` rows into, its blocks of 16 filled up; PyTorch allocates it at each direct call.
inline int64_t reordered_bytes(DType dtype, int64_t filters, int64_t channels, int64_t taps) {
  return checked_product({round_up(filters, 16), round_up(channels, 16), taps, size_of(dtype)});
}

template <class P>
bool onednn_supports(const P& p, Reason& reason) {
  static const bool bf16 = mkldnn_says("mkldnn::_is_mkldnn_bf16_supported"),
                    f16 = mkldnn_says("mkldnn::_is_mkldnn_fp16_supported");
  if ((p.dtype == DType::bf16 && !bf16) || (p.dtype == DType::f16 && !f16))
    return refuse(reason, "oneDNN does not compute in %s on this processor", ai3::name_of(p.dtype));
  return true;
}

}  // namespace ai3::ops

// What PyTorch's oneDNN computes in on this processor, and with which instructions.
#pragma once
#include <strings.h>

#include "../../algos/core/level.h"
#include "layout.h"

namespace ai3::ops {

inline constexpr uint32_t kOneDnnDtypes = dtype_bit(DType::f32) | dtype_bit(DType::bf16) | dtype_bit(DType::f16);

// The names of oneDNN's levels, each with what those before it have; later ones are not told apart here.
inline constexpr const char* kOneDnnLevels[] = {
    "SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI", "AVX512_CORE_BF16"};
inline constexpr int kAvx2 = 2, kAvx512 = 5, kAvx512Bf16 = 7, kUnlimited = std::size(kOneDnnLevels);

// The level that ONEDNN_MAX_CPU_ISA names, which oneDNN reads as it is read here: an index of the list, or kUnlimited.
inline int onednn_limit() {
  static const int limit = [] {
    const char* named = std::getenv("ONEDNN_MAX_CPU_ISA");
    if (!named) named = std::getenv("DNNL_MAX_CPU_ISA");
    int level = 0;
    while (level < kUnlimited && !(named && strcasecmp(named, kOneDnnLevels[level]) == 0)) level++;
    return level;
  }();
  return limit;
}

// How many float32 a vector has where oneDNN computes with AVX2 or AVX-512; 0 with less.
inline int64_t onednn_wide_vector() {
  static const int64_t elements = [] {
    const std::string best = usable_levels().front();
    if (best == "portable" || onednn_limit() < kAvx2) return 0;
    return best == "avx512" && onednn_limit() >= kAvx512 ? 16 : 8;
  }();
  return elements;
}

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
  // PyTorch asks the processor, not what oneDNN is limited to.
  static const bool bf16 = mkldnn_says("mkldnn::_is_mkldnn_bf16_supported") && onednn_limit() >= kAvx512,
                    f16 = mkldnn_says("mkldnn::_is_mkldnn_fp16_supported") && onednn_limit() > kAvx512Bf16;
  if ((p.dtype == DType::bf16 && !bf16) || (p.dtype == DType::f16 && !f16))
    return refuse(reason, "oneDNN does not compute in %s on this processor", ai3::name_of(p.dtype));
  return true;
}

}  // namespace ai3::ops

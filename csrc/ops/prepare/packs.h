// Packed weights as tensors.
#pragma once
#include "run.h"

namespace ai3::ops {

// Packed weights are plain 1-D tensors of the weight's dtype: the algorithm's form (the weight itself where it has none) and a
// tag of what they were made for, since a pack may outlive the process, in an exported program, and meet another instruction set.
template <class P>
bool has_packs(const AlgorithmInfo& info) {
  const auto& t = reinterpret_cast<const Algorithm<P>&>(info).traits;
  return is_method<P>(info) && (t.packed_bytes || t.epilogue);
}
inline constexpr int64_t kTagBytes = 64;
uint64_t pack_tag(const Entry& entry, std::span<const int64_t> description);
Tensor new_pack(const Tensor& weight, int64_t bytes);
void tag_pack(Tensor& pack, uint64_t tag);
void check_pack(const Entry& entry, const Tensor& pack, int64_t bytes, uint64_t tag);
// The tag of a pack on the CPU; 0 where the tensor is too small to be one.
uint64_t tag_of_pack(const Tensor& pack);

template <class P>
Tensor pack_weight(const Chosen<P>& chosen, const P& p, const Tensor& weight, std::span<const int64_t> description) {
  const Traits<P>& traits = chosen.algorithm->traits;
  Tensor pack = new_pack(weight, packed_tensor_bytes(traits, p));
  if (packed_bytes_of(traits, p) > 0) {
    const Tensor whole = as_contiguous(weight);
    with_workspace(*chosen.entry, pack_workspace_of(traits, p), weight,
                   [&](Workspace& workspace) { traits.pack(p, whole.const_data_ptr(), pack.mutable_data_ptr(), workspace); });
  } else {
    Tensor place = torch::stable::narrow(pack, 0, 0, weight.numel());
    torch::stable::copy_(place, torch::stable::flatten(as_contiguous(weight)));
  }
  tag_pack(pack, pack_tag(*chosen.entry, description));
  return pack;
}

}  // namespace ai3::ops

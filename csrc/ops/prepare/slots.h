// Packed weights that are kept between calls. A slot belongs to one layer: a swapped module (which frees it), or a call in a
// compiled or exported program, which names it by a number that no other layer has. It holds a few packs of that layer's weight,
// for the algorithms and dtypes that it was called with.
#pragma once
#include <functional>

#include "packs.h"

namespace ai3::ops {

// The slot of a call, and the version counter of its weight where the caller knows it.
struct Slot {
  static constexpr int64_t kNone = 0;                            // packs are not kept
  static constexpr int64_t kUnversioned = -1, kAskVersion = -2;  // an inference tensor; ask PyTorch
  int64_t id = kNone, version = kAskVersion;
  explicit operator bool() const { return id != kNone; }
};

// The version counter of a slot's weight: what the caller said, or what PyTorch says.
int64_t version_of(const Slot& slot, const Tensor& weight);

// What a pack is made for, besides the weight: the algorithm and everything that the pack's form may depend on.
struct PackKey {
  const AlgorithmInfo* algorithm;
  uint64_t description;
  ScalarType dtype;
  bool packed = true;      // else it is a copy of the weight
  void* stream = nullptr;  // on CUDA, that of the calls: work of another one would have to wait for the pack, and its memory for
                           // the work
  bool operator==(const PackKey&) const = default;
};

// The pack of `weight` that the slot holds for `key`; made by `make(weight)`, which gets a contiguous weight of key.dtype, where
// there is none or where the weight changed since: its memory, strides, version or a fixed sample of its elements. The memory is
// held with the pack, so that no other weight can come to lie there; a weight that took another's place frees both at the next
// call. Nothing where a pack cannot be kept, because nothing tells a later change (a weight with gaps or overlaps) or because the
// slot's weight is another one in every call (a parametrized weight). Calls of many `products` (multiplications) compare more.
// On CUDA, where reading elements would wait for the device, memory, strides and version alone tell; a weight without a version
// is not kept, and nothing is while a graph is captured, of whose memory and time a pack then is.
std::optional<Tensor> kept(const Slot& slot, const PackKey& key, const Tensor& weight, int64_t products,
                           const std::function<Tensor(const Tensor&)>& make);

inline int64_t bytes_of(const Tensor& t) { return t.numel() * static_cast<int64_t>(t.element_size()); }

}  // namespace ai3::ops

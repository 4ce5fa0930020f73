// Packed weights as tensors.
#include "../algos/core/level.h"
#include "tensors.h"

namespace ai3::ops {

Activation activation_named(const Entry& entry, const std::string& word) {
  static const char* const words[] = {"none", "relu", "relu6", "hardswish", "silu", "gelu"};
  std::string known;
  for (int i = 0; i < static_cast<int>(std::size(words)); i++) {
    if (word == words[i]) return static_cast<Activation>(i);
    known += (i ? ", " : "") + std::string(words[i]);
  }
  fail(entry, "needs an activation of ", known, ", got '", word, "'");
}

// FNV-1a of everything that a pack's form may depend on.
uint64_t pack_tag(const Entry& entry, const Sizes& description) {
  uint64_t hash = 0xcbf29ce484222325u;
  auto mix = [&](const void* data, size_t size) {
    for (size_t i = 0; i < size; i++) hash = (hash ^ static_cast<const unsigned char*>(data)[i]) * 0x100000001b3u;
  };
  const AlgorithmInfo* info = entry.on(Device::cpu);
  if (info) mix(info->level, std::strlen(info->level));
  mix(level().data(), level().size());  // a user's algorithm says "user" whatever it was compiled for
  mix(entry.name.data(), entry.name.size());
  mix(description.data(), description.size() * sizeof(int64_t));
  return hash;
}

Tensor new_pack(const Tensor& weight, int64_t bytes) {
  // Zeroed, padding included, so that two packs of one weight are equal.
  Tensor pack = empty({bytes / static_cast<int64_t>(weight.element_size())}, weight.scalar_type(), weight);
  return torch::stable::zero_(pack);
}

namespace {
char* tag_of(const Tensor& pack, int64_t bytes) {
  return static_cast<char*>(const_cast<void*>(pack.const_data_ptr())) + bytes - kTagBytes;
}
}  // namespace

void tag_pack(Tensor& pack, uint64_t tag) {
  if (!pack.is_cpu()) return;
  char* place = tag_of(pack, pack.numel() * static_cast<int64_t>(pack.element_size()));
  std::memset(place, 0, kTagBytes);
  std::memcpy(place, &tag, sizeof(tag));
}

void check_pack(const Entry& entry, const Tensor& pack, int64_t bytes, uint64_t tag) {
  check(pack.dim() == 1 && is_contiguous(pack) && pack.numel() * static_cast<int64_t>(pack.element_size()) == bytes, entry,
        "needs a packed weight of ", bytes, " bytes from ai3::_", entry.operation->name, "_", entry.name,
        "_pack with the same arguments, got a tensor of sizes ", to_string(sizes_of(pack)));
  if (!pack.is_cpu()) return;
  check(std::memcmp(tag_of(pack, bytes), &tag, sizeof(tag)) == 0, entry,
        "needs a weight that was packed with the same arguments and for this instruction set; pack it again");
}

}  // namespace ai3::ops

// What a pack was made for, and whether one fits.
#include "packs.h"

#include <cstring>

#include "../../algos/core/level.h"
#include "../dispatch/hash.h"

namespace ai3::ops {

// Raised when an algorithm packs in another form than before: a program that was exported then packs again.
constexpr uint64_t kPackVersion = 5;

// A hash of everything that a pack's form may depend on.
uint64_t pack_tag(const Entry& entry, std::span<const int64_t> description) {
  Hash hash;
  if (const AlgorithmInfo* info = entry.on(Device::cpu)) hash.add(std::string_view(info->level));
  hash.add(std::string_view(level()));  // a user's algorithm says "user" whatever it was compiled for
  hash.add(std::string_view(entry.name)).add(kPackVersion << 1 | level_has_pair_products()).add(description);
  return hash.value() & 0xbfffbfffbfffbfffu;  // no element type reads NaN or infinity in it, so that packs compare as tensors
}

Tensor new_pack(const Tensor& weight, int64_t bytes) {
  // Zeroed, padding included, so that two packs of one weight are equal.
  Tensor pack = empty({bytes / static_cast<int64_t>(weight.element_size())}, weight.scalar_type(), weight);
  if (pack.is_cpu()) ask_for_huge_pages(pack.const_data_ptr(), bytes);
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

uint64_t tag_of_pack(const Tensor& pack) {
  const int64_t bytes = pack.numel() * static_cast<int64_t>(pack.element_size());
  uint64_t tag = 0;
  if (bytes >= kTagBytes) std::memcpy(&tag, tag_of(pack, bytes), sizeof(tag));
  return tag;
}

void check_pack(const Entry& entry, const Tensor& pack, int64_t bytes, uint64_t tag) {
  check(pack.dim() == 1 && is_contiguous(pack) && pack.numel() * static_cast<int64_t>(pack.element_size()) == bytes, entry,
        "needs a packed weight of ", bytes, " bytes from ai3::_", entry.operation->name, "_", entry.name,
        "_pack with the same arguments, got a tensor of sizes ", pack);
  if (!pack.is_cpu()) return;
  check(std::memcmp(tag_of(pack, bytes), &tag, sizeof(tag)) == 0, entry,
        "needs a weight that was packed with the same arguments and for this instruction set; pack it again");
}

}  // namespace ai3::ops

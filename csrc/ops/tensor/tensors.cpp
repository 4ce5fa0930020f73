// Tensors made and looked at: outputs, what shares memory, packed weights.
#include "tensors.h"

#include <cstdlib>

#include "../../algos/core/level.h"
#include "../prepare/passes.h"
#include "scratch.h"

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
                threads(t.numel()),
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

char* LentWorkspace::lend(Workspace& workspace, int64_t bytes) {
  auto& self = static_cast<LentWorkspace&>(workspace);
  if (bytes < 0 || bytes >= int64_t{1} << 62) throw NotEnoughMemory(bytes);
  const int64_t whole = std::max<int64_t>(bytes, 64);
  return static_cast<char*>(self.lent.emplace_back(empty({whole}, ScalarType::Byte, self.like)).mutable_data_ptr());
}

void check_numel(std::initializer_list<int64_t> sizes) {
  int64_t bytes = 8;
  for (int64_t s : sizes) bytes = checked_mul(bytes, std::max<int64_t>(s, 1));
  if (bytes == kOverflow) throw std::runtime_error("a tensor of sizes " + to_string(Sizes(sizes)) + " is too large");
}
void check_each(std::initializer_list<int64_t> numbers) {
  for (int64_t n : numbers)
    if (n < -1 || n > INT32_MAX)
      throw std::runtime_error("needs values up to " + std::to_string(INT32_MAX) + ", got " + std::to_string(n));
}

namespace {

// Where a tensor's elements are, in bytes from its first one.
struct Extent {
  const char* first;
  int64_t last;  // of the last element
  int64_t rest;  // the same, of dimensions whose stride is no multiple of the period
};
Extent extent_of(const Tensor& t, int64_t period) {
  Extent e{static_cast<const char*>(t.const_data_ptr()), 0, 0};
  for (int64_t d = 0; d < t.dim(); d++) {
    const int64_t bytes = (t.size(d) - 1) * t.stride(d) * static_cast<int64_t>(t.element_size());
    e.last += bytes;
    if (t.stride(d) * static_cast<int64_t>(t.element_size()) % period) e.rest += bytes;
  }
  return e;
}

}  // namespace

void check_apart(const Entry& entry, const Tensor& out, const Tensor& other, const char* name, const char* written) {
  if (out.numel() == 0 || other.numel() == 0) return;
  const int64_t size = static_cast<int64_t>(out.element_size()), other_size = static_cast<int64_t>(other.element_size());
  const Extent a = extent_of(out, 1), b = extent_of(other, 1);
  bool apart = a.first + a.last + size <= b.first || b.first + b.last + other_size <= a.first;
  for (int64_t d = 0; d < out.dim() && !apart; d++) {
    const int64_t period = out.stride(d) * size;
    if (out.size(d) == 1 || period == 0) continue;
    const Extent x = extent_of(out, period), y = extent_of(other, period);
    const int64_t shift = ((x.first - y.first) % period + period) % period;
    apart = shift >= y.rest + other_size && shift + x.rest + size <= period;
  }
  check(apart, entry, "needs ", written, " that shares no memory with ", name);
}

void check_workspace(const Entry& entry, const std::optional<Tensor>& workspace, std::initializer_list<Named> others) {
  if (!workspace) return;
  const Tensor& w = *workspace;
  for (const Named& other : others) {
    if (!other.tensor) continue;
    check(w.device() == other.tensor->device(), entry, "needs a workspace on the device of ", other.name, ", got ",
          device_text(w), " and ", device_text(*other.tensor));
    check_apart(entry, w, *other.tensor, other.name, "a workspace");
  }
  check(w.scalar_type() == ScalarType::Byte && is_contiguous(w), entry, "needs a contiguous uint8 tensor as workspace, got ",
        torch::headeronly::toString(w.scalar_type()), " of sizes ", w);
  const uintptr_t alignment = w.is_cuda() ? 256 : 64;  // cuBLAS's
  check(std::bit_cast<uintptr_t>(w.const_data_ptr()) % alignment == 0, entry, "needs a workspace that begins at a multiple of ",
        alignment, " bytes");
}

void check_place(const Entry& entry, const Tensor& input, const Tensor& t, const Sizes& sizes, const char* name) {
  check_same(entry, input, t, name);
  check(sizes_of(t) == sizes, entry, "needs ", name, " of sizes ", sizes, ", got ", t);
}
void mark_written(const Entry& entry, const Tensor& out) {
  check(out.defined(), entry, "needs a tensor as out, got None");
  call_aten("aten::transpose_", "", out, int64_t{0}, int64_t{0});  // changes nothing else
}

namespace {
constexpr const char* kActivations[] = {"none",        "relu", "relu6",     "hardswish", "silu", "gelu",      "sigmoid",
                                        "hardsigmoid", "tanh", "gelu_tanh", "prelu",     "elu",  "leaky_relu"};
}
std::optional<Activation> activation_called(const std::string& word) {
  if (word == "leaky_relu") return Activation::prelu;
  for (size_t i = 0; i < std::size(kActivations); i++)
    if (word == kActivations[i]) return static_cast<Activation>(i);
  return std::nullopt;
}
Activation activation_named(const Entry& entry, const std::string& word) {
  if (const std::optional<Activation> found = activation_called(word)) return *found;
  std::string known;
  for (const char* name : kActivations) known += (known.empty() ? "" : ", ") + std::string(name);
  fail(entry, "needs an activation of ", known, ", got '", word, "'");
}

// Raised when an algorithm packs in another form than before: a program that was exported then packs again.
constexpr uint64_t kPackVersion = 4;

// FNV-1a of everything that a pack's form may depend on; the numbers in one step each.
uint64_t pack_tag(const Entry& entry, std::span<const int64_t> description) {
  constexpr uint64_t prime = 0x100000001b3u;
  uint64_t hash = 0xcbf29ce484222325u;
  auto mix = [&](const char* word) {
    while (*word) hash = (hash ^ static_cast<unsigned char>(*word++)) * prime;
  };
  const AlgorithmInfo* info = entry.on(Device::cpu);
  if (info) mix(info->level);
  mix(level().c_str());  // a user's algorithm says "user" whatever it was compiled for
  mix(entry.name.c_str());
  auto mix_number = [&](uint64_t value) {
    hash = (hash ^ value) * prime;
    hash ^= hash >> 32;
  };
  mix_number(kPackVersion << 1 | level_has_pair_products());
  for (int64_t value : description) mix_number(static_cast<uint64_t>(value));
  return hash & 0xbfffbfffbfffbfffu;  // no element type reads NaN or infinity in it, so that packs compare as tensors
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

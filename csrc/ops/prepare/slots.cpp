#include "slots.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <iterator>

#include "../dispatch/hash.h"
#include "../dispatch/sharded.h"

namespace ai3::ops {
namespace {

constexpr size_t kPacksAtMost = 8;  // of a slot: algorithms, dtypes and copies of a program's weights
// After so many misses in a row a slot keeps only every so-manieth pack: its weight changes from call to call (in training, or
// because it is computed), and packing into a workspace is cheaper.
constexpr int kMissesAtMost = 16;
constexpr uint64_t kIdleAtMost = 64;  // calls of a slot after which a pack that none used is freed
constexpr size_t kSampleWords = 32;   // of a weight's memory, compared at every call
// In a call with at least so many products for each row of the weight's memory (of one output, mostly), which take far longer
// than reading one word more, a word of each row is compared as well.
constexpr int64_t kProductsOfARow = 1 << 15;
constexpr size_t kRowsAtMost = 1024;

bool is_transposed(const Tensor& t) { return t.dim() == 2 && t.stride(0) == 1 && t.stride(1) == t.size(0); }
bool dense_memory(const Tensor& t) { return is_contiguous(t) || is_transposed(t) || (t.dim() == 4 && is_dense(t, true)); }

// A hash of one word, each time elsewhere, of each of `count` equal parts of memory, the first word among them; of all words
// where there are fewer, and of less than a word of all bytes. A change of one of them always shows.
uint64_t sample(const char* data, size_t bytes, size_t count) {
  constexpr uint64_t odd = 0x9e3779b97f4a7c15u;
  const size_t words = bytes / sizeof(uint64_t);
  uint64_t hash = 0;
  if (words == 0) std::memcpy(&hash, data, bytes);
  count = std::min(words, count);
  const size_t step = count > 0 ? (words << 16) / count : 0;  // in parts of a word, without a division for each
  for (size_t i = 0; i < count; i++) {
    const size_t within = static_cast<uint32_t>(i * (odd >> 32)) * (step >> 16) >> 32;
    uint64_t word;
    std::memcpy(&word, data + ((i * step >> 16) + within) * sizeof word, sizeof word);
    hash += word * (odd * (2 * i + 1));
  }
  return hash;
}
uint64_t sample(const Tensor& weight, size_t count) {
  return sample(static_cast<const char*>(weight.const_data_ptr()), static_cast<size_t>(bytes_of(weight)), count);
}

// What tells a weight that was packed from another one, besides its memory.
struct Mark {
  ScalarType dtype;
  int64_t version, elements;
  std::array<int64_t, 4> strides;
  uint64_t sample;
  bool operator==(const Mark&) const = default;
};
Mark mark_of(const Tensor& weight, int64_t version) {
  Mark mark{};
  mark.dtype = weight.scalar_type();
  mark.version = version;
  mark.elements = weight.numel();
  for (int64_t d = 0; d < weight.dim() && d < 4; d++) mark.strides[static_cast<size_t>(d)] = weight.stride(d);
  mark.sample = weight.is_cpu() ? sample(weight, kSampleWords) : 0;
  return mark;
}

int64_t version_of(const Tensor& t) { return from_stack<int64_t>(call_dispatcher("aten::_version", "", t)[0]); }

// A tensor of its own on the memory of t, which lives as long as it does whatever becomes of t (`t.data = other`).
Tensor holding(const Tensor& t) {
  const auto sizes = t.sizes(), strides = t.strides();
  int64_t offset = 0;
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_offset(t.get(), &offset));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(t.get(), t.dim(), sizes.data(), strides.data(), offset, &handle));
  return Tensor(handle);
}

struct Packs {
  struct One {
    PackKey key;
    Mark mark;
    Tensor weight;  // its memory
    Tensor pack;
    uint64_t rows;  // a sample of as many words as the weight has rows
    uint64_t used;  // in which call
  };
  std::vector<One> list;
  // Marks of weights whose packs were freed because another took their place. Where one comes back, the slot's calls alternate
  // between weights, and it keeps the packs of several.
  std::array<Mark, kPacksAtMost> replaced{};
  size_t replacements = 0;
  uint64_t calls = 0;
  int misses = 0;  // since the last hit
  int64_t made = 0;
};

// Whether one is of this weight. Where the caller cannot say the version, `mark` gets it. There, a program's constants may lie in
// memory that is its own, which no tensor holds and which it fills anew for other tensors: so the storage is compared, too. That
// tells whether PyTorch knows a version: what made a storage says whether its tensors have one.
bool holds(const Packs::One& one, const PackKey& key, Mark& mark, const Tensor& weight, bool ask, size_t rows) {
  if (one.key != key || one.weight.const_data_ptr() != weight.const_data_ptr()) return false;
  if (ask) {
    if (!from_stack<bool>(call_dispatcher("aten::is_set_to", "", one.weight, weight)[0])) return false;
    mark.version = one.mark.version == Slot::kUnversioned ? Slot::kUnversioned : version_of(weight);
  }
  return one.mark == mark && (rows == 0 || one.rows == sample(weight, rows));
}

// Takes those for which `condition` holds out of a list, for the caller to destroy when no lock is held.
std::vector<Packs::One> take_out(std::vector<Packs::One>& list, const auto& condition) {
  const auto kept = std::stable_partition(list.begin(), list.end(), [&](const Packs::One& one) { return !condition(one); });
  std::vector<Packs::One> out(std::make_move_iterator(kept), std::make_move_iterator(list.end()));
  list.erase(kept, list.end());
  return out;
}

using Parts = Sharded<Packs>;

}  // namespace

int64_t version_of(const Slot& slot, const Tensor& weight) {
  if (slot.version != Slot::kAskVersion) return slot.version;
  if (from_stack<bool>(call_dispatcher("aten::is_inference", "", weight)[0])) return Slot::kUnversioned;
  return version_of(weight);
}

std::optional<Tensor> kept(const Slot& slot, const PackKey& asked, const Tensor& weight, int64_t products,
                           const std::function<Tensor(const Tensor&)>& make) {
  if (!slot || weight.numel() == 0 || !dense_memory(weight)) return std::nullopt;
  PackKey key = asked;
  const bool readable = weight.is_cpu();
  if (!readable) {
    key.stream = current_cuda_stream(weight.get_device_index());
    if (is_cuda_capturing(key.stream) || version_of(slot, weight) == Slot::kUnversioned) return std::nullopt;
  }
  const bool ask = slot.version == Slot::kAskVersion;
  Mark mark = mark_of(weight, slot.version);
  const int64_t in_memory = weight.size(is_transposed(weight) ? 1 : 0);
  const size_t rows = std::min(static_cast<size_t>(in_memory), kRowsAtMost);
  const bool each = readable && rows > kSampleWords && products / in_memory >= kProductsOfARow;
  std::vector<Packs::One> idle, old;  // destroyed when no lock is held
  bool several = false;
  Parts::Part& part = Parts::part_of(slot.id);
  {
    const std::lock_guard lock(part.mutex);
    Packs& packs = part.map[slot.id];
    packs.calls++;
    for (Packs::One& one : packs.list)
      if (holds(one, key, mark, weight, ask, each ? rows : 0)) {
        packs.misses = 0, one.used = packs.calls;
        const Tensor pack = one.pack;
        if (packs.list.size() > 1)
          idle = take_out(packs.list, [&](const Packs::One& o) { return o.used + kIdleAtMost < packs.calls; });
        return pack;
      }
    mark.version = version_of(slot, weight);
    several = std::ranges::count(packs.replaced, mark) > 0;
    if (packs.misses++ > kMissesAtMost && packs.misses % kMissesAtMost != 0) {
      idle = std::move(packs.list), packs.list.clear();
      return std::nullopt;
    }
  }
  const uint64_t sampled = readable ? sample(weight, rows) : 0;
  Tensor contiguous = as_contiguous(weight);
  if (contiguous.scalar_type() != key.dtype) contiguous = torch::stable::to(contiguous, key.dtype);
  Tensor memory = holding(weight), pack = make(contiguous);  // not under the lock: other layers' calls run on
  const void* data = memory.const_data_ptr();
  const std::lock_guard lock(part.mutex);
  const auto found = part.map.find(slot.id);
  if (found == part.map.end()) return pack;  // freed meanwhile
  Packs& packs = found->second;
  // A pack of what the same memory held before will not be asked for again, and one of other memory only where calls alternate.
  old = take_out(packs.list, [&](const Packs::One& o) {
    return (!several && o.weight.const_data_ptr() != data) || (o.key == key && o.weight.const_data_ptr() == data);
  });
  for (const Packs::One& one : old)
    if (one.weight.const_data_ptr() != data) packs.replaced[packs.replacements++ % kPacksAtMost] = one.mark;
  if (packs.list.size() == kPacksAtMost) {
    const auto first = std::ranges::min_element(packs.list, {}, &Packs::One::used);
    old.push_back(std::move(*first)), packs.list.erase(first);
  }
  packs.list.push_back({key, mark, std::move(memory), pack, sampled, packs.calls});
  packs.made++;
  return pack;
}

}  // namespace ai3::ops

// Frees the packs of a slot.
extern "C" AI3_EXPORT void ai3_slot_free(int64_t id) {
  ai3::ops::Packs packs;  // destroyed when no lock is held
  ai3::ops::Parts::Part& part = ai3::ops::Parts::part_of(id);
  const std::lock_guard lock(part.mutex);
  const auto found = part.map.find(id);
  if (found == part.map.end()) return;
  packs = std::move(found->second);
  part.map.erase(found);
}
// A hash of a fixed sample of several pieces of memory: few words of each, so that hundreds of weights take microseconds.
extern "C" AI3_EXPORT uint64_t ai3_sample(const void* const* data, const int64_t* bytes, int64_t count) {
  constexpr size_t kWords = 4;
  ai3::ops::Hash hash;
  for (int64_t i = 0; i < count; i++)
    hash.add(ai3::ops::sample(static_cast<const char*>(data[i]), static_cast<size_t>(bytes[i]), kWords));
  return hash.value();
}
// Bytes of the packs that a slot holds; `made` gets how many packs it has made, `keeps` whether it still keeps new ones.
extern "C" AI3_EXPORT int64_t ai3_slot_bytes(int64_t id, int64_t* made, bool* keeps) {
  int64_t bytes = 0;
  *made = 0, *keeps = true;
  ai3::ops::Parts::Part& part = ai3::ops::Parts::part_of(id);
  const std::lock_guard lock(part.mutex);
  const auto found = part.map.find(id);
  if (found == part.map.end()) return 0;
  const ai3::ops::Packs& packs = found->second;
  for (const auto& one : packs.list) bytes += ai3::ops::bytes_of(one.pack);
  *made = packs.made, *keeps = packs.misses <= ai3::ops::kMissesAtMost;
  return bytes;
}

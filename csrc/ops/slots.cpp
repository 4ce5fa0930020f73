#include "slots.h"

#include <array>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

namespace ai3::ops {
namespace {

constexpr size_t kPacksAtMost = 8;  // of a slot: algorithms, dtypes and copies of a program's weights
// After so many misses in a row a slot keeps only every so-manieth pack: its weight changes from call to call (in training, or
// because it is computed), and packing into a workspace is cheaper.
constexpr int kMissesAtMost = 16;
constexpr size_t kSampleWords = 32;  // of a weight's memory, compared at every call

// What tells a weight that was packed from another one.
struct Mark {
  const void* data;
  int64_t version, elements;
  std::array<int64_t, 4> strides;
  std::array<uint64_t, kSampleWords> sample;
  bool operator==(const Mark&) const = default;
};

bool dense_memory(const Tensor& t) { return is_contiguous(t) || (t.dim() == 4 && is_dense(t, true)); }

int64_t version_of(const Tensor& weight) {
  if (from_stack<bool>(call_dispatcher("aten::is_inference", "", weight)[0])) return Slot::kUnversioned;
  return from_stack<int64_t>(call_dispatcher("aten::_version", "", weight)[0]);
}

// Evenly chosen words of memory, the first and the last among them; of less than a word, all of it.
void sample(const char* data, size_t bytes, uint64_t* to, size_t at_most) {
  const size_t words = bytes / sizeof(uint64_t);
  if (words == 0) {
    std::memcpy(to, data, bytes);
    return;
  }
  const size_t count = std::min(words, at_most);
  for (size_t i = 0; i < count; i++)
    std::memcpy(&to[i], data + (count == 1 ? 0 : i * (words - 1) / (count - 1)) * sizeof(uint64_t), sizeof(uint64_t));
}

Mark mark_of(const Tensor& weight, int64_t version) {
  Mark mark{};
  mark.data = weight.const_data_ptr();
  mark.version = version == Slot::kAskVersion ? version_of(weight) : version;
  mark.elements = weight.numel();
  for (int64_t d = 0; d < weight.dim() && d < 4; d++) mark.strides[static_cast<size_t>(d)] = weight.stride(d);
  sample(static_cast<const char*>(mark.data), static_cast<size_t>(bytes_of(weight)), mark.sample.data(), kSampleWords);
  return mark;
}

struct Packs {
  struct One {
    PackKey key;
    Mark mark;
    Tensor pack;
  };
  std::mutex mutex;
  std::vector<One> list;  // the latest last
  int misses = 0;         // since the last hit
  int64_t made = 0;
};

std::shared_mutex mutex;
// Never destroyed: threads may still call when the process ends, and PyTorch's allocator may be gone.
auto& slots = *new std::unordered_map<int64_t, std::shared_ptr<Packs>>();

std::shared_ptr<Packs> find_slot(int64_t id, bool make) {
  {
    const std::shared_lock lock(mutex);
    if (const auto found = slots.find(id); found != slots.end()) return found->second;
  }
  if (!make) return nullptr;
  const std::unique_lock lock(mutex);
  auto& place = slots[id];
  if (!place) place = std::make_shared<Packs>();
  return place;
}

}  // namespace

std::optional<Tensor> kept(const Slot& slot, const PackKey& key, const Tensor& weight,
                           const std::function<Tensor(const Tensor&)>& make) {
  if (!slot || !weight.is_cpu() || weight.numel() == 0 || !dense_memory(weight)) return std::nullopt;
  const std::shared_ptr<Packs> packs = find_slot(slot.id, true);
  const Mark mark = mark_of(weight, slot.version);
  {
    const std::lock_guard lock(packs->mutex);
    for (const Packs::One& one : packs->list)
      if (one.key == key && one.mark == mark) {
        packs->misses = 0;
        return one.pack;
      }
    if (packs->misses++ > kMissesAtMost && packs->misses % kMissesAtMost != 0) return std::nullopt;
  }
  Tensor contiguous = as_contiguous(weight);
  if (contiguous.scalar_type() != key.dtype) contiguous = torch::stable::to(contiguous, key.dtype);
  Tensor pack = make(contiguous);
  const std::lock_guard lock(packs->mutex);
  auto& list = packs->list;
  // A pack of what the weight was before will not be asked for again: the same memory, or, of a parameter that was replaced,
  // the oldest of many.
  std::erase_if(list, [&](const Packs::One& one) { return one.key == key && one.mark.data == mark.data; });
  if (list.size() == kPacksAtMost) list.erase(list.begin());
  list.push_back({key, mark, pack});
  packs->made++;
  return pack;
}

}  // namespace ai3::ops

using ai3::ops::find_slot;
// Frees the packs of a slot.
extern "C" AI3_EXPORT void ai3_slot_free(int64_t id) {
  std::shared_ptr<ai3::ops::Packs> packs;  // destroyed when no lock is held
  const std::unique_lock lock(ai3::ops::mutex);
  const auto found = ai3::ops::slots.find(id);
  if (found == ai3::ops::slots.end()) return;
  packs = std::move(found->second);
  ai3::ops::slots.erase(found);
}
// A hash of a fixed sample of several pieces of memory: few words of each, so that hundreds of weights take microseconds.
extern "C" AI3_EXPORT uint64_t ai3_sample(const void* const* data, const int64_t* bytes, int64_t count) {
  constexpr size_t kWords = 4;
  uint64_t hash = 0xcbf29ce484222325u;
  for (int64_t i = 0; i < count; i++) {
    uint64_t words[kWords] = {};
    ai3::ops::sample(static_cast<const char*>(data[i]), static_cast<size_t>(bytes[i]), words, kWords);
    for (const uint64_t word : words) hash = (hash ^ word) * 0x100000001b3u, hash ^= hash >> 32;
  }
  return hash;
}
// Bytes of the packs that a slot holds; `made` gets how many packs it has made, `keeps` whether it still keeps new ones.
extern "C" AI3_EXPORT int64_t ai3_slot_bytes(int64_t id, int64_t* made, bool* keeps) {
  int64_t bytes = 0;
  *made = 0, *keeps = true;
  const auto packs = find_slot(id, false);
  if (!packs) return 0;
  const std::lock_guard lock(packs->mutex);
  for (const auto& one : packs->list) bytes += ai3::ops::bytes_of(one.pack);
  *made = packs->made, *keeps = packs->misses <= ai3::ops::kMissesAtMost;
  return bytes;
}

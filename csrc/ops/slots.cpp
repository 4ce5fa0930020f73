#include "slots.h"

#include <array>
#include <cstring>
#include <functional>
#include <mutex>
#include <unordered_map>

#include "fork.h"

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
  mark.version = version;
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
  std::vector<One> list;  // the latest last
  int misses = 0;         // since the last hit
  int64_t made = 0;
};

// Each call looks its slot up, so that threads should seldom meet. Never destroyed: they may still call when the process ends,
// and PyTorch's allocator may be gone.
struct alignas(64) Part {
  std::mutex mutex;
  std::unordered_map<int64_t, Packs> slots;
};
auto& parts = *new std::array<Part, 64>();
Part& part_of(int64_t id) { return parts[static_cast<uint64_t>(id) * 0x9e3779b97f4a7c15u >> 58]; }
[[maybe_unused]] const int at_fork = guard_at_fork(
    [] {
      for (Part& part : parts) part.mutex.lock();
    },
    [] {
      for (Part& part : parts) part.mutex.unlock();
    });

}  // namespace

int64_t version_of(const Slot& slot, const Tensor& weight) {
  if (slot.version != Slot::kAskVersion) return slot.version;
  if (from_stack<bool>(call_dispatcher("aten::is_inference", "", weight)[0])) return Slot::kUnversioned;
  return from_stack<int64_t>(call_dispatcher("aten::_version", "", weight)[0]);
}

std::optional<Tensor> kept(const Slot& slot, const PackKey& key, const Tensor& weight,
                           const std::function<Tensor(const Tensor&)>& make) {
  if (!slot || !weight.is_cpu() || weight.numel() == 0 || !dense_memory(weight)) return std::nullopt;
  const Mark mark = mark_of(weight, version_of(slot, weight));
  Part& part = part_of(slot.id);
  {
    const std::lock_guard lock(part.mutex);
    Packs& packs = part.slots[slot.id];
    for (const Packs::One& one : packs.list)
      if (one.key == key && one.mark == mark) {
        packs.misses = 0;
        return one.pack;
      }
    if (packs.misses++ > kMissesAtMost && packs.misses % kMissesAtMost != 0) return std::nullopt;
  }
  Tensor contiguous = as_contiguous(weight);
  if (contiguous.scalar_type() != key.dtype) contiguous = torch::stable::to(contiguous, key.dtype);
  Tensor pack = make(contiguous);  // not under the lock: other layers' calls run on
  std::vector<Packs::One> old;     // destroyed when no lock is held
  const std::lock_guard lock(part.mutex);
  const auto found = part.slots.find(slot.id);
  if (found == part.slots.end()) return pack;  // freed meanwhile
  auto& [list, misses, made] = found->second;
  // A pack of what the weight was before will not be asked for again: the same memory, or, of a parameter that was replaced,
  // the oldest of many.
  for (size_t i = list.size(); i-- > 0;)
    if (list[i].key == key && list[i].mark.data == mark.data)
      old.push_back(std::move(list[i])), list.erase(list.begin() + static_cast<std::ptrdiff_t>(i));
  if (list.size() == kPacksAtMost) old.push_back(std::move(list.front())), list.erase(list.begin());
  list.push_back({key, mark, pack});
  made++;
  return pack;
}

}  // namespace ai3::ops

// Frees the packs of a slot.
extern "C" AI3_EXPORT void ai3_slot_free(int64_t id) {
  ai3::ops::Packs packs;  // destroyed when no lock is held
  ai3::ops::Part& part = ai3::ops::part_of(id);
  const std::lock_guard lock(part.mutex);
  const auto found = part.slots.find(id);
  if (found == part.slots.end()) return;
  packs = std::move(found->second);
  part.slots.erase(found);
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
  ai3::ops::Part& part = ai3::ops::part_of(id);
  const std::lock_guard lock(part.mutex);
  const auto found = part.slots.find(id);
  if (found == part.slots.end()) return 0;
  const ai3::ops::Packs& packs = found->second;
  for (const auto& one : packs.list) bytes += ai3::ops::bytes_of(one.pack);
  *made = packs.made, *keeps = packs.misses <= ai3::ops::kMissesAtMost;
  return bytes;
}

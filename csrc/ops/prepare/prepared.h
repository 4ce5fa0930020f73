// A call that is ready to run: what is computed by what, with everything decided that does not depend on where tensors lie.
// Prepared calls are kept by the value of their problem, so that a call derives nothing that one before it has derived.
#pragma once
#include <bit>
#include <mutex>

#include "../dispatch/registry.h"

namespace ai3::ops {

// What runs for p when `asked` is called; throws the refusal.
template <class P>
struct Chosen {
  Chosen() = default;
  Chosen(const Entry& asked, Device device, const P& p) {
    Reason reason;
    entry = select(asked, device, p, reason);
    if (!entry) refused(asked, device, p, reason);
    algorithm = entry->algorithm<P>(device);
    chosen_by_rule = entry != &asked;
  }
  // The problem as what runs has it: with parameters of its own.
  P own(const P& p) const { return chosen_by_rule ? with_parameters(p, entry->defaults) : p; }
  const Entry* entry = nullptr;
  const Algorithm<P>* algorithm = nullptr;
  bool chosen_by_rule = false;
};

template <class P>
struct Prepared : Chosen<P> {
  P problem{};
  // Bytes: of workspace beside a weight that was packed before; of a call that packs the weight itself, its pack and the rest.
  int64_t workspace = 0, pack = 0, workspace_beside_pack = 0;
  int64_t pack_tensor = 0;   // what the pack operator returns,
  bool packs_alone = false;  // and whether that is the algorithm's form: else it is a copy of the weight

  void execute(const typename P::Operands& operands, Workspace& memory) const { this->algorithm->run(problem, operands, memory); }
};

// Where a call runs: GPUs of one machine differ, so what they support may, too.
struct Where {
  Device device = Device::cpu;
  int32_t index = 0;
  bool operator==(const Where&) const = default;
};

// Whether two problems that differ in nothing else lie alike in memory.
inline bool same(const Strides4& a, const Strides4& b) { return a.n == b.n && a.c == b.c && a.h == b.h && a.w == b.w; }
template <class P>
bool same_layout(const P& a, const P& b) {
  if constexpr (requires { a.x_stride; }) return same(a.x_stride, b.x_stride) && same(a.y_stride, b.y_stride);
  if constexpr (requires { a.row; })
    if (a.row != b.row) return false;
  if constexpr (requires { a.x_row; }) return a.x_row == b.x_row && a.y_row == b.y_row;
  return true;
}

// The calls of one kind of problem, by its value (`value_of` in its problem.h; one that has none is prepared at every call).
// Problems with patterns of what a rule may not choose are not kept. The hash of a problem names a set, which holds those of its
// problems that were met last.
template <class P>
class CachedCalls {
 public:
  struct Key {
    const void* asked;  // an Entry, or an Algorithm for a problem that it is known to support
    Where where;
    uint64_t generation;
    decltype(value_of(std::declval<const P&>())) value;
    bool operator==(const Key&) const = default;
  };
  // make() where the call is not kept. A set is never waited for: where another thread is at it, or was when the process was
  // forked, the call is derived.
  template <class Make>
  static Prepared<P> get(const Key& key, const Make& make) {
    static constinit std::array<Set, kSets> sets{};
    Set& set = sets[hash(key) % kSets];
    if (const std::unique_lock lock(set.mutex, std::try_to_lock); lock)
      for (One& one : set.ones)
        if (one.used && one.key == key) return one.used = ++set.clock, one.call;
    const uint64_t before = unanswered();
    const Prepared<P> call = make();  // not under the lock: a user's rule may ask for other calls
    if (unanswered() != before) return call;
    if (const std::unique_lock lock(set.mutex, std::try_to_lock); lock) {
      One* oldest = set.ones.data();
      for (One& one : set.ones)
        if (one.used < oldest->used) oldest = &one;
      *oldest = {key, ++set.clock, call};
    }
    return call;
  }

 private:
  static constexpr size_t kSets = 128, kOnes = 4;
  struct One {
    Key key{};
    uint64_t used = 0;  // when; 0: empty
    Prepared<P> call{};
  };
  struct Set {
    std::mutex mutex;
    uint64_t clock = 0;
    std::array<One, kOnes> ones{};
  };
  static uint64_t hash(const Key& key) {
    constexpr uint64_t prime = 0x9e3779b97f4a7c15u;
    uint64_t a = std::bit_cast<uintptr_t>(key.asked), b = static_cast<uint64_t>(key.where.index);  // two, for two at once
    for (size_t i = 0; i + 1 < key.value.size(); i += 2) {
      a = (a ^ static_cast<uint64_t>(key.value[i])) * prime, b = (b ^ static_cast<uint64_t>(key.value[i + 1])) * prime;
      a ^= a >> 29, b ^= b >> 31;
    }
    a = (a ^ b ^ static_cast<uint64_t>(key.value.back())) * prime;
    return a >> 32;
  }
};

// The call as `chosen` makes it.
template <class P>
Prepared<P> derive(const Chosen<P>& chosen, const P& p, bool runs) {
  const Traits<P>& traits = chosen.algorithm->traits;
  Prepared<P> call{chosen, p};
  const P alone = of_weight_alone(p);
  call.pack_tensor = packed_tensor_bytes(traits, alone), call.packs_alone = packed_bytes_of(traits, alone) > 0;
  if (!runs) return call;
  if (traits.workspace) call.workspace = call.workspace_beside_pack = traits.workspace(p);
  if (traits.packed_bytes) {
    const P q = in_direct_call(traits, p);
    call.pack = packed_bytes_of(traits, q);
    call.workspace_beside_pack = std::max(traits.workspace ? traits.workspace(q) : 0, pack_workspace_of(traits, q));
  }
  return call;
}
template <class P>
Prepared<P> prepare_cached(const void* asked, Where where, const P& p, const auto& make) {
  if constexpr (requires { value_of(p); }) {
    bool whole = true;  // the value says all
    if constexpr (requires { p.exclude; }) whole = !p.exclude;
    if (whole) return CachedCalls<P>::get({asked, where, generation(), value_of(p)}, make);
  }
  return make();
}

// What runs for p when `asked` is called; throws the refusal. Without `runs`, where there is nothing to compute, no bytes but the
// pack's are told.
template <class P>
Prepared<P> prepare(const Entry& asked, Where where, const P& p, bool runs = true) {
  auto derived = [&] {
    const Chosen<P> chosen(asked, where.device, p);
    return derive(chosen, chosen.own(p), runs);
  };
  const auto* algorithm = asked.algorithm<P>(where.device);
  const Traits<P>* traits = algorithm ? &algorithm->traits : nullptr;
  const bool at_once = !traits || !(traits->choose || traits->supports || traits->workspace || traits->packed_bytes);
  return at_once || !runs ? derived() : prepare_cached(&asked, where, p, derived);
}
// The same call of tensors that lie in memory as p has it.
template <class P>
Prepared<P> relaid(const Prepared<P>& call, Where where, const P& p) {
  return prepare_cached(call.algorithm, where, p, [&] { return derive<P>(call, p, true); });
}

}  // namespace ai3::ops

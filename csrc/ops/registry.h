// The registry: operations, their algorithms on each device, and the dispatcher operators that call them.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <atomic>
#include <string>
#include <vector>

#include "../algos/core/algorithm.h"

namespace ai3::ops {

struct Entry;

// One kind of operator that each algorithm of an operation gets: the algorithm itself, its backward, packing, ...
struct OperatorKind {
  const char* prefix;  // "ai3::" + prefix + algorithm + suffix, e.g. "_conv2d_" "winograd" "_pack"
  const char* suffix;
  const char* signature;  // arguments and results of the schema
  void (*call)(const Entry&, StableIValue* stack);
  bool (*wanted)(const AlgorithmInfo&);  // null: every algorithm gets it
};

// Asked about a problem that Python describes as a flat list of sizes (-1: unknown), see each operation's `problem_from`.
struct Query {
  DType dtype;
  const int64_t* sizes;
  int count;
};

struct Operation {
  const char* name;
  const char* sizes;  // names of Query's sizes, space-separated: the contract with Python
  const OperatorKind* kinds;
  int kind_count;
  const Entry* (*select)(const Entry&, Device, const Query&, Reason&);  // what runs, see below
  int64_t (*workspace)(const Entry&, Device, const Query&);             // bytes, a direct call's packed weights included
  std::string (*describe)(const AlgorithmInfo&);                        // JSON members of its traits
};
// Puts an operation into the registry's list; the list is an ELF section, as that of the algorithms.
#define AI3_OPERATION(name_, ...)                                                                                    \
  constinit const ::ai3::ops::Operation name_##_operation = {#name_, __VA_ARGS__};                                   \
  [[gnu::section("ai3_operations"), gnu::used]] static const ::ai3::ops::Operation* const name_##_operation_record = \
      &name_##_operation;

// An algorithm's name with its implementation on each device. Entries are never freed or moved.
struct Entry {
  const Operation* operation;
  std::string name;
  std::atomic<const AlgorithmInfo*> implementations[2];

  const AlgorithmInfo* on(Device device) const {
    return implementations[static_cast<int>(device)].load(std::memory_order_acquire);
  }
  template <class Problem>
  const Algorithm<Problem>* algorithm(Device device) const {
    return reinterpret_cast<const Algorithm<Problem>*>(on(device));
  }
};

const Entry* find(const char* operation, const char* name);
std::vector<const Entry*> entries(const Operation& operation);
// What `default` runs instead of its rule (`register(..., default=True)`), or null.
const Entry* default_override(const Operation& operation);
AI3_INLINE const char* name_of(Device d) { return d == Device::cpu ? "CPU" : "CUDA"; }

// What runs for p on `device`: `entry` itself or, where that is a rule, what it chooses. Null, with the reason, when `entry`
// cannot.
template <class P>
const Entry* select(const Entry& entry, Device device, const P& p, Reason& reason) {
  const auto* a = entry.algorithm<P>(device);
  if (!a) return refuse(reason, "has no %s kernel", name_of(device)), nullptr;
  if (!(a->traits.dtypes & dtype_bit(p.dtype))) return refuse(reason, "does not compute in %s", ai3::name_of(p.dtype)), nullptr;
  if (a->traits.supports && !a->traits.supports(p, reason)) return nullptr;
  if (!a->traits.choose) return &entry;
  Reason ignored;
  if (entry.name == "default")
    if (const Entry* preferred = default_override(*entry.operation); preferred && preferred != &entry)
      if (const Entry* chosen = select(*preferred, device, p, ignored)) return chosen;
  // `choose` takes a plain function, so what it needs to know waits here; rules may ask other rules.
  static thread_local Device asked_device;
  static thread_local const Operation* asked_operation;
  asked_device = device, asked_operation = entry.operation;
  const char* name = a->traits.choose(p, [](const P& problem, const char* candidate) {
    const Device d = asked_device;
    const Operation* o = asked_operation;
    const Entry* c = find(o->name, candidate);
    Reason unused;
    const bool yes = c && select(*c, d, problem, unused);
    asked_device = d, asked_operation = o;
    return yes;
  });
  const Entry* chosen = name ? find(entry.operation->name, name) : nullptr;
  if (!chosen) return refuse(reason, "no algorithm that its rule may choose supports this case"), nullptr;
  return select(*chosen, device, p, reason);
}

// The sentence for a refusal: what the operator needs and got, and who can do it.
template <class P>
[[noreturn]] void refused(const Entry& entry, Device device, const P& p, const Reason& reason) {
  std::string message = std::string("ai3::") + entry.operation->name + "_" + entry.name + ": " + reason.text +
                        "; algorithms that support this case: ";
  bool first = true;
  for (const Entry* e : entries(*entry.operation)) {
    Reason ignored;
    if (e == &entry || !select(*e, device, p, ignored)) continue;
    message += (first ? "" : ", ") + e->name;
    first = false;
  }
  if (first) message += "none";
  throw std::runtime_error(message);
}

// What runs for p when `asked` is called; throws the refusal.
template <class P>
struct Chosen {
  Chosen(const Entry& asked, Device device, const P& p) {
    Reason reason;
    entry = select(asked, device, p, reason);
    if (!entry) refused(asked, device, p, reason);
    algorithm = entry->algorithm<P>(device);
  }
  const Entry* entry;
  const Algorithm<P>* algorithm;
};

// Bytes of workspace in a direct call: the algorithm's own, and its packed weights.
template <class P>
int64_t packed_bytes_of(const Traits<P>& traits, const P& p) {
  return traits.packed_bytes ? round_up(traits.packed_bytes(p), 64) : 0;
}
template <class P>
int64_t workspace_bytes_of(const Traits<P>& traits, const P& p) {
  return checked_add(packed_bytes_of(traits, p), traits.workspace ? traits.workspace(p) : 0);
}

std::string describe_traits(Accuracy, double error_bound, bool deterministic, Layout, uint32_t dtypes, bool epilogue, bool packs,
                            bool rule, bool tensors);
template <class P>
std::string describe(const AlgorithmInfo& info) {
  const auto& t = reinterpret_cast<const Algorithm<P>&>(info).traits;
  return describe_traits(t.accuracy, t.error_bound, t.deterministic, t.layout, t.dtypes, t.epilogue, t.packed_bytes != nullptr,
                         t.choose != nullptr, t.tensors != nullptr);
}
// The functions of an Operation over its problem struct, given `P problem_from(const Query&)`.
template <class P, P (*problem_from)(const Query&)>
struct Queries {
  static const Entry* select(const Entry& e, Device d, const Query& q, Reason& reason) {
    return ops::select(e, d, problem_from(q), reason);
  }
  static int64_t workspace(const Entry& e, Device d, const Query& q) {
    const P p = problem_from(q);
    Reason reason;
    const Entry* chosen = ops::select(e, d, p, reason);
    return chosen ? workspace_bytes_of(chosen->algorithm<P>(d)->traits, p) : 0;
  }
};
#define AI3_QUERIES(P, problem_from) \
  ::ai3::ops::Queries<P, problem_from>::select, ::ai3::ops::Queries<P, problem_from>::workspace, ::ai3::ops::describe<P>

}  // namespace ai3::ops

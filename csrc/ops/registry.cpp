#include "registry.h"

#include <array>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

extern "C" {
extern const ai3::AlgorithmInfo* const __start_ai3_algorithms[];
extern const ai3::AlgorithmInfo* const __stop_ai3_algorithms[];
extern const ai3::ops::Operation* const __start_ai3_operations[];
extern const ai3::ops::Operation* const __stop_ai3_operations[];
}

#include "../algos/core/level.h"
#include "tensors.h"

namespace ai3::ops {

void* (*current_cuda_stream)(int32_t) = [](int32_t) -> void* { return nullptr; };

namespace {

struct Registry {
  std::mutex mutex;
  std::map<std::pair<std::string, std::string>, std::unique_ptr<Entry>> entries;
  std::map<std::string, std::atomic<const Entry*>> defaults;
};
Registry& registry() {
  static Registry* r = new Registry;  // never destroyed: operators may be called while the process ends
  return *r;
}

const Operation* operation_named(const char* name) {
  for (auto o = __start_ai3_operations; o != __stop_ai3_operations; o++)
    if (std::string(name) == (*o)->name) return *o;
  return nullptr;
}

// A boxed kernel is not told its operator's name, so each operator gets a function of its own from this pool.
constexpr int kSlots = 192, kKindsAtMost = 4;
const Entry* slots[kSlots];
int used_slots = 0;

template <int slot, int kind>
void boxed(StableIValue* stack, uint64_t, uint64_t) {
  const Entry& entry = *slots[slot];
  entry.operation->kinds[kind].call(entry, stack);
}
using Boxed = void (*)(StableIValue*, uint64_t, uint64_t);
template <int... i>
constexpr auto make_pool(std::integer_sequence<int, i...>) {
  return std::array<Boxed, sizeof...(i)>{boxed<i / kKindsAtMost, i % kKindsAtMost>...};
}
constexpr auto pool = make_pool(std::make_integer_sequence<int, kSlots * kKindsAtMost>());

void define_operators(Entry& entry, const AlgorithmInfo& info) {
  using torch::stable::detail::StableLibrary;
  if (used_slots == kSlots) throw std::runtime_error("ai3: no room for another algorithm in this process");
  const int slot = used_slots++;
  slots[slot] = &entry;
  // Never destroyed: destroying a library takes its operators back.
  static auto& definitions = *new StableLibrary(StableLibrary::Kind::FRAGMENT, "ai3", nullptr, __FILE__, __LINE__);
  static auto& cpu = *new StableLibrary(StableLibrary::Kind::IMPL, "ai3", "CPU", __FILE__, __LINE__);
  static auto& cuda = *new StableLibrary(StableLibrary::Kind::IMPL, "ai3", "CUDA", __FILE__, __LINE__);
  for (int kind = 0; kind < entry.operation->kind_count; kind++) {
    const OperatorKind& k = entry.operation->kinds[kind];
    if (k.wanted && !k.wanted(info)) continue;
    const std::string name = k.prefix + entry.name + k.suffix;
    definitions.def((name + k.signature).c_str());
    const Boxed function = pool[slot * kKindsAtMost + kind];
    cpu.impl(name.c_str(), function);
    cuda.impl(name.c_str(), function);
  }
}

void add(const AlgorithmInfo& info, bool replace) {
  if (info.abi != kAlgorithmAbi)
    throw std::runtime_error(std::string("ai3: ") + info.operation + " algorithm '" + info.name +
                             "' was built against another version of ai3/algorithm.h; build it again");
  const Operation* operation = operation_named(info.operation);
  if (!operation) throw std::runtime_error(std::string("ai3: unknown operation '") + info.operation + "'");
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  auto& place = r.entries[{info.operation, info.name}];
  const bool fresh = !place;
  if (fresh) {
    place.reset(new Entry{operation, info.name, {}});
    define_operators(*place, info);
  }
  auto& implementation = place->implementations[static_cast<int>(info.device)];
  if (implementation.load() && !replace)
    throw std::runtime_error(std::string("ai3: ") + info.operation + " has an algorithm '" + info.name + "' already");
  implementation.store(&info, std::memory_order_release);
}

}  // namespace

const Entry* find(const char* operation, const char* name) {
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  const auto it = r.entries.find({operation, name});
  return it == r.entries.end() ? nullptr : it->second.get();
}
std::vector<const Entry*> entries(const Operation& operation) {
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  std::vector<const Entry*> found;
  for (const auto& [key, entry] : r.entries)
    if (entry->operation == &operation) found.push_back(entry.get());
  return found;
}
const Entry* default_override(const Operation& operation) {
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  const auto it = r.defaults.find(operation.name);
  return it == r.defaults.end() ? nullptr : it->second.load();
}

std::string describe_traits(Accuracy accuracy, double error_bound, bool deterministic, Layout layout, uint32_t dtypes,
                            bool epilogue, bool packs, bool rule, bool tensors) {
  static const char* const accuracies[] = {"exact", "bounded", "approximate"};
  static const char* const layouts[] = {"any", "nchw", "nhwc"};
  auto flag = [](const char* name, bool value) { return std::string(",\"") + name + "\":" + (value ? "true" : "false"); };
  std::string types;
  for (DType t : {DType::f64, DType::f32, DType::bf16, DType::f16})
    if (dtypes & dtype_bit(t)) types += std::string(types.empty() ? "\"" : ",\"") + ai3::name_of(t) + "\"";
  char bound[32];
  std::snprintf(bound, sizeof(bound), "%.3g", error_bound);
  return std::string("\"accuracy\":\"") + accuracies[static_cast<int>(accuracy)] + "\",\"error_bound\":" + bound +
         ",\"layout\":\"" + layouts[static_cast<int>(layout)] + "\",\"dtypes\":[" + types + "]" +
         flag("deterministic", deterministic) + flag("epilogue", epilogue) + flag("packs", packs) + flag("rule", rule) +
         flag("vendor", tensors);
}

}  // namespace ai3::ops

using namespace ai3;
using namespace ai3::ops;

namespace {
template <class Body>
auto guarded(char* error, int64_t size, const Body& body) -> decltype(body()) {
  try {
    return body();
  } catch (const std::exception& e) {
    if (error && size > 0) std::snprintf(error, static_cast<size_t>(size), "%s", e.what());
    return {};
  }
}
const Entry& entry_named(const char* operation, const char* name) {
  const Entry* e = find(operation, name);
  if (!e) throw std::runtime_error(std::string("ai3: no ") + operation + " algorithm '" + name + "'");
  return *e;
}
}  // namespace

// The C interface, for Python (ctypes), for _C_cuda and for C++ programs. Every function returns 0 on failure and writes the
// reason into `error`; a positive or non-null result is success.
extern "C" {
#define AI3_EXPORT [[gnu::visibility("default")]]

AI3_EXPORT int ai3_register(const AlgorithmInfo* info, int replace, char* error, int64_t size) {
  return guarded(error, size, [&] { return add(*info, replace != 0), 1; });
}
// What gives CUDA kernels their stream; _C_cuda calls this when it is loaded.
AI3_EXPORT void ai3_set_cuda_stream(void* (*current_stream)(int32_t device)) { current_cuda_stream = current_stream; }
// `name` null or "": back to the rule.
AI3_EXPORT int ai3_set_default(const char* operation, const char* name, char* error, int64_t size) {
  return guarded(error, size, [&] {
    const Entry* e = name && *name ? &entry_named(operation, name) : nullptr;
    Registry& r = registry();
    const std::lock_guard lock(r.mutex);
    r.defaults[operation].store(e);
    return 1;
  });
}
// 1: supported; 0: `error` says why not.
AI3_EXPORT int ai3_supports(const char* operation, const char* name, int device, int dtype, const int64_t* sizes, int count,
                            char* error, int64_t size) {
  return guarded(error, size, [&] {
    const Entry& e = entry_named(operation, name);
    Reason reason{};
    if (!e.operation->select(e, static_cast<Device>(device), {static_cast<DType>(dtype), sizes, count}, reason))
      throw std::runtime_error(reason.text);
    return 1;
  });
}
// The name of the algorithm that runs: `name` itself unless it is a rule.
AI3_EXPORT const char* ai3_resolve(const char* operation, const char* name, int device, int dtype, const int64_t* sizes,
                                   int count, char* error, int64_t size) {
  return guarded(error, size, [&]() -> const char* {
    const Entry& e = entry_named(operation, name);
    Reason reason{};
    const Entry* chosen = e.operation->select(e, static_cast<Device>(device), {static_cast<DType>(dtype), sizes, count}, reason);
    if (!chosen) throw std::runtime_error(reason.text);
    return chosen->name.c_str();
  });
}
// Bytes, -1 on failure.
AI3_EXPORT int64_t ai3_workspace(const char* operation, const char* name, int device, int dtype, const int64_t* sizes, int count,
                                 char* error, int64_t size) {
  struct Bytes {
    int64_t value = -1;
  };
  return guarded(
             error, size,
             [&] {
               const Entry& e = entry_named(operation, name);
               return Bytes{e.operation->workspace(e, static_cast<Device>(device), {static_cast<DType>(dtype), sizes, count})};
             })
      .value;
}
// Measured with this many threads (at the first call, under 50 ms): float32 multiply-add peak and read bandwidth, per second.
AI3_EXPORT int ai3_machine(int threads, double* flops, double* bytes, char* error, int64_t size) {
  return guarded(error, size, [&] {
    const Machine m = measure_machine(threads);
    *flops = m.flops, *bytes = m.bytes;
    return 1;
  });
}
// JSON: {"level": ..., "levels": [...], "operations": {name: {"sizes": [...], "algorithms": {name: {"CPU": {...}, "CUDA":
// {...}}}}}}. Valid until the next call from the same thread.
AI3_EXPORT const char* ai3_registry() {
  static thread_local std::string json;
  json = std::string("{\"level\":\"") + level() + "\",\"operations\":{";
  bool first_operation = true;
  for (auto o = __start_ai3_operations; o != __stop_ai3_operations; o++) {
    json += std::string(first_operation ? "\"" : ",\"") + (*o)->name + "\":{\"sizes\":\"" + (*o)->sizes + "\",\"algorithms\":{";
    first_operation = false;
    bool first = true;
    for (const Entry* e : entries(**o)) {
      json += (first ? "\"" : ",\"") + e->name + "\":{";
      first = false;
      bool first_device = true;
      for (Device d : {Device::cpu, Device::cuda})
        if (const AlgorithmInfo* info = e->on(d)) {
          json += std::string(first_device ? "\"" : ",\"") + ops::name_of(d) + "\":{" + (*o)->describe(*info) + "}";
          first_device = false;
        }
      json += "}";
    }
    json += "}}";
  }
  json += "}}";
  return json.c_str();
}
}  // extern "C"

namespace {
char load_failure[1024];  // an exception must not leave a library's initialization: it would end the process
}
// Why the library could not register its operators; empty when it could.
extern "C" AI3_EXPORT const char* ai3_load_failure() { return load_failure; }

STABLE_TORCH_LIBRARY_FRAGMENT(ai3, m) {
  (void)m;
  guarded(load_failure, sizeof(load_failure), [] {
    const std::string& wanted = level();
    for (auto a = __start_ai3_algorithms; a != __stop_ai3_algorithms; a++)
      if (wanted == (*a)->level || std::string("glue") == (*a)->level) add(**a, false);
    return 1;
  });
}

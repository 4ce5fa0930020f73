#include "registry.h"

#include <fnmatch.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <utility>

extern "C" {
extern const ai3::AlgorithmInfo* const __start_ai3_algorithms[];
extern const ai3::AlgorithmInfo* const __stop_ai3_algorithms[];
extern const ai3::ops::Operation* const __start_ai3_operations[];
extern const ai3::ops::Operation* const __stop_ai3_operations[];
extern const ai3::ops::SharedOperator* const __start_ai3_operators[];
extern const ai3::ops::SharedOperator* const __stop_ai3_operators[];
}

#include "../prepare/packs.h"
#include "../tensor/onednn.h"

namespace ai3::ops {

void* (*current_cuda_stream)(int32_t) = [](int32_t) -> void* { return nullptr; };
bool (*is_cuda_capturing)(void*) = [](void*) { return false; };

namespace {

std::mutex mutex;  // of registration; calls never wait for it
std::atomic<uint64_t> registrations{0};

const Operation* operation_named(const char* name) {
  for (auto o = __start_ai3_operations; o != __stop_ai3_operations; o++)
    if (std::strcmp(name, (*o)->name) == 0) return *o;
  return nullptr;
}

// What leaves an operator is std::runtime_error alone, which PyTorch turns into RuntimeError, with the operator's name in front,
// also where it is PyTorch that refuses.
[[noreturn]] void rethrow(const std::string& label) {
  try {
    throw;
  } catch (const NotEnoughMemory& e) {
    throw std::runtime_error("ai3::" + label + ": not enough memory for " + std::to_string(e.bytes) + " bytes more");
  } catch (const std::exception& e) {
    if (std::strstr(e.what(), "ai3::")) throw std::runtime_error(e.what());
    throw std::runtime_error("ai3::" + label + ": " + e.what());
  } catch (...) {
    throw std::runtime_error("ai3::" + label + ": " + kNoWords);
  }
}

// A boxed kernel is not told its operator's name, so each operator gets a function of its own from a pool.
using Boxed = void (*)(StableIValue*, uint64_t, uint64_t);
constexpr int kSlots = 160, kSharedAtMost = 32;
const Entry* slots[kSlots];
const SharedOperator* shared_slots[kSharedAtMost];
int used_slots = 0, used_shared_slots = 0;

// Those get the parameters among their numbers.
constexpr bool is_for_inference(const OperatorKind& kind) { return std::string_view(kind.suffix) == "_infer"; }
// The schema of an algorithm with parameters of its own: they are the last arguments, and given by name.
std::string with_own(const Entry& entry, const OperatorKind& kind) {
  std::string text = kind.signature.text;
  if (is_for_inference(kind)) return text;
  for (const Parameter& p : entry.parameters) {
    const size_t end = text.rfind(") ->");
    text.insert(end, (text.find("*,") < end ? ", " : ", *, ") + p.schema);
  }
  return text;
}
// `own` are the parameters of an algorithm's own, which follow.
void check_counts(const Schema& schema, size_t own, uint64_t arguments, uint64_t results) {
  if (arguments == schema.arguments + own && results == schema.results) [[likely]]
    return;
  throw std::runtime_error("takes " + std::to_string(schema.arguments + own) + " arguments and has " +
                           std::to_string(schema.results) + " results, was called with " + std::to_string(arguments) + " and " +
                           std::to_string(results) + "; its schema is " + schema.text);
}
// What those of the pools do; a copy in each of them would take the compiler a quarter of a minute.
[[gnu::noinline]] void call_slot(int i, StableIValue* stack, uint64_t arguments, uint64_t results) {
  const Entry& entry = *slots[i / kKindsAtMost];
  const OperatorKind& kind = entry.operation->kinds[i % kKindsAtMost];
  try {
    check_counts(kind.signature, is_for_inference(kind) ? 0 : entry.parameters.size(), arguments, results);
    kind.call(entry, stack);
  } catch (...) {
    rethrow(std::string(entry.operation->name) + "_" + entry.name);
  }
}
[[gnu::noinline]] void call_shared_slot(int i, StableIValue* stack, uint64_t arguments, uint64_t results) {
  try {
    check_counts(shared_slots[i]->schema, 0, arguments, results);
    shared_slots[i]->call(stack);
  } catch (...) {
    const std::string schema = shared_slots[i]->schema.text;
    rethrow(schema.substr(0, schema.find('(')));
  }
}
template <int i>
void boxed(StableIValue* stack, uint64_t arguments, uint64_t results) {
  call_slot(i, stack, arguments, results);
}
template <int i>
void boxed_shared(StableIValue* stack, uint64_t arguments, uint64_t results) {
  call_shared_slot(i, stack, arguments, results);
}
constexpr auto pool = []<int... i>(std::integer_sequence<int, i...>) { return std::array<Boxed, sizeof...(i)>{boxed<i>...}; }
(std::make_integer_sequence<int, kSlots * kKindsAtMost>());
constexpr auto shared_pool = []<int... i>(std::integer_sequence<int, i...>) {
  return std::array<Boxed, sizeof...(i)>{boxed_shared<i>...};
}
(std::make_integer_sequence<int, kSharedAtMost>());

auto& functions = *new std::unordered_map<std::string, Boxed>();  // of all operators, by name; under `mutex`

// One function serves all devices: it looks at its arguments, and refuses readably where there is no kernel for theirs.
void define(const std::string& name, const std::string& signature, Boxed function) {
  // Never destroyed: destroying a library takes its operators back.
  static auto& definitions = *new StableLibrary(StableLibrary::Kind::FRAGMENT, "ai3", nullptr, __FILE__, __LINE__);
  static auto& cpu = *new StableLibrary(StableLibrary::Kind::IMPL, "ai3", "CPU", __FILE__, __LINE__);
  static auto& cuda = *new StableLibrary(StableLibrary::Kind::IMPL, "ai3", "CUDA", __FILE__, __LINE__);
  definitions.def((name + signature).c_str());
  functions.emplace(name, function);
  cpu.impl(name.c_str(), function);
  cuda.impl(name.c_str(), function);
}
void define_shared(const SharedOperator& o) {
  if (used_shared_slots == kSharedAtMost) throw std::runtime_error("ai3: kSharedAtMost is too small");
  const int slot = used_shared_slots++;
  shared_slots[slot] = &o;
  const std::string schema = o.schema.text;
  const size_t name = schema.find('(');
  define(schema.substr(0, name), schema.substr(name), shared_pool[static_cast<size_t>(slot)]);
}

// A name whose operators would be the operation's shared ones is refused.
void check_name(const Operation& operation, const char* name) {
  for (const OperatorKind* k = operation.kinds; k != operation.kinds + operation.kind_count; k++)
    for (const SharedOperator* o = operation.shared; o != operation.shared + operation.shared_count; o++) {
      const std::string mine = std::string(k->prefix) + name + k->suffix, schema = o->schema.text;
      if (mine == schema.substr(0, schema.find('(')))
        throw std::runtime_error(std::string("ai3: ") + operation.name + " can have no algorithm '" + name + "': ai3::" + mine +
                                 " is an operator of the operation itself; choose another name");
    }
}

bool same_parameters(const std::vector<Parameter>& a, const std::vector<Parameter>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const Parameter& x, const Parameter& y) { return x.schema == y.schema && x.words == y.words; });
}

// Registers an algorithm for one device, or replaces it there. Operators stay once they are defined: where a replacement does not
// pack, those for packed weights take weights as they are, tagged, and where it fuses nothing, they refuse that.
void add(const AlgorithmInfo& info, bool replace) {
  if (info.abi != kAlgorithmAbi)
    throw std::runtime_error(std::string("ai3: ") + info.operation + " algorithm '" + info.name +
                             "' was built against another version of ai3/algorithm.h; build it again");
  const Operation* operation = operation_named(info.operation);
  if (!operation) throw std::runtime_error(std::string("ai3: unknown operation '") + info.operation + "'");
  const std::lock_guard lock(mutex);
  auto* entry = const_cast<Entry*>(find(*operation, info.name));
  if (entry && entry->on(info.device) && !replace)
    throw std::runtime_error(std::string("ai3: ") + info.operation + " has an algorithm '" + info.name + "' already");
  const Entry* first = operation->state->first.load();
  const bool is_new = !entry;
  if (!is_new && !same_parameters(entry->parameters, parameters_of(operation->parameters(info))))
    throw std::runtime_error(std::string("ai3: ") + info.operation + " algorithm '" + info.name +
                             "' has other parameters than the one that it replaces; choose another name");
  if (is_new) {
    check_name(*operation, info.name);
    if (used_slots == kSlots) throw std::runtime_error("ai3: no room for another algorithm in this process");
    std::vector<Parameter> parameters = parameters_of(operation->parameters(info));
    Parameters defaults;
    for (size_t i = 0; i < parameters.size(); i++) defaults.values[i] = parameters[i].otherwise;
    entry = new Entry{operation, info.name, used_slots, 0, first, {}, std::move(parameters), defaults};
    slots[used_slots++] = entry;
  }
  for (int kind = 0; kind < operation->kind_count; kind++) {
    const OperatorKind& k = operation->kinds[kind];
    if (entry->defined >> kind & 1 || (k.wanted && !k.wanted(info))) continue;
    if (is_for_inference(k) && !entry->parameters.empty() && !std::strstr(k.signature.text, "int numbers")) continue;
    define(k.prefix + entry->name + k.suffix, with_own(*entry, k), pool[static_cast<size_t>(entry->slot * kKindsAtMost + kind)]);
    entry->defined.fetch_or(1u << kind);
  }
  // Published last, when all that could fail has not: the registry never holds an algorithm without its operators.
  entry->implementations[static_cast<int>(info.device)].store(&info, std::memory_order_release);
  if (is_new) operation->state->first.store(entry, std::memory_order_release);
  registrations.fetch_add(1, std::memory_order_release);  // last: what was prepared without it belongs to the generation before
}

}  // namespace

const Operation& operation_known(const char* name) {
  const Operation* o = operation_named(name);
  if (!o) throw std::runtime_error(std::string("ai3: unknown operation '") + name + "'");
  return *o;
}
int64_t mark_of(std::span<const int64_t> sizes) {
  uint64_t mark = 0;
  for (const int64_t size : sizes) mark = mark * 31 + static_cast<uint64_t>(size);
  return static_cast<int64_t>(mark % 251) * 64 + 32;  // no pack for the CPU has 32 bytes more than a multiple of 64
}
uint64_t generation() { return registrations.load(std::memory_order_acquire); }
const Entry& entry_named(const Operation& operation, const std::string& name) {
  const Entry* e = find(operation, name.c_str());
  if (!e) throw std::runtime_error(std::string("ai3: no ") + operation.name + " algorithm '" + name + "'");
  return *e;
}
bool matches_any(const char* patterns, const std::string& name) {
  for (const char* at = patterns; *at;) {
    const char* const end = at + std::strcspn(at, ",");
    if (fnmatch(std::string(at, end).c_str(), name.c_str(), 0) == 0) return true;
    at = *end ? end + 1 : end;
  }
  return false;
}
std::vector<const Entry*> entries(const Operation& operation) {
  std::vector<const Entry*> found;
  for (const Entry* e = operation.state->first.load(std::memory_order_acquire); e; e = e->next) found.push_back(e);
  std::sort(found.begin(), found.end(), [](const Entry* a, const Entry* b) { return a->name < b->name; });
  return found;
}

std::string describe_traits(const TraitsRecord& t) {
  static const char* const accuracies[] = {"exact", "bounded", "approximate"};
  static const char* const layouts[] = {"any", "nchw", "nhwc"};
  auto flag = [](const char* name, bool value) { return std::string(",\"") + name + "\":" + (value ? "true" : "false"); };
  auto word = [](const char* name, const char* value) { return std::string("\"") + name + "\":\"" + value + "\","; };
  std::string types;
  for (DType d : {DType::f64, DType::f32, DType::bf16, DType::f16})
    if (t.dtypes & dtype_bit(d)) types += std::string(types.empty() ? "\"" : ",\"") + ai3::name_of(d) + "\"";
  char bound[32];
  std::snprintf(bound, sizeof(bound), "%.3g", t.error_bound);
  return word("accuracy", accuracies[static_cast<int>(t.accuracy)]) + word("layout", layouts[static_cast<int>(t.layout)]) +
         word("backward", t.own_gradients ? "own" : "aten") + "\"error_bound\":" + bound + ",\"dtypes\":[" + types + "]" +
         (t.activations ? ",\"activations\":[\"" + activations_in(t.activations, "\",\"") + "\"]" : "") +
         flag("deterministic", t.deterministic) + flag("epilogue", t.epilogue) + flag("prologue", t.prologue) +
         flag("sliced", t.sliced) + flag("packs", t.packs) + flag("rule", t.rule) + flag("vendor", t.vendor);
}

}  // namespace ai3::ops

using namespace ai3;
using namespace ai3::ops;

namespace {
Boxed function_named(const char* name) {
  const std::lock_guard lock(mutex);
  const auto found = functions.find(name);
  if (found == functions.end()) throw std::runtime_error(std::string("ai3: no operator ai3::") + name);
  return found->second;
}
}  // namespace

// What a function of the C interface is asked about: a problem, by its sizes, and the algorithm's parameters (null: their
// defaults). `exclude` has patterns of algorithms that a rule may not choose, between commas; null or "": none.
struct ai3_question {
  int32_t device, index, dtype;  // index: of the GPU, -1: the current one
  int32_t allow_tf32;
  const int64_t* sizes;
  int32_t count, parameter_count;
  const int64_t* parameters;
  const char* exclude;
};

namespace {
struct Asked {
  const Entry& entry;
  Device device;
  Parameters parameters;
  Query query;
  std::optional<torch::stable::accelerator::DeviceGuard> guard;  // what a GPU supports, it is asked itself
  Asked(const char* operation, const char* name, const ai3_question& q)
      : entry(entry_named(operation_known(operation), name)),
        device(static_cast<Device>(q.device)),
        query{static_cast<DType>(q.dtype), q.sizes, q.count, q.exclude && *q.exclude ? q.exclude : nullptr, q.allow_tf32 != 0} {
    if (q.device < 0 || q.device > 1 || q.dtype < 0 || q.dtype > 3) throw std::runtime_error("ai3: unknown device or dtype");
    if (device == Device::cuda && q.index >= 0 && entry.on(device)) guard.emplace(q.index);
    if (!q.parameters) return;
    if (q.parameter_count != static_cast<int32_t>(entry.parameters.size()))
      throw std::runtime_error("needs " + std::to_string(entry.parameters.size()) + " parameters, got " +
                               std::to_string(q.parameter_count));
    std::copy_n(q.parameters, q.parameter_count, parameters.values);
    query.parameters = &parameters;
  }
  Asked(const Asked&) = delete;
  const Entry& select(const char** why = nullptr) const {
    Reason reason{};
    const Entry* chosen = entry.operation->select(entry, device, query, reason, why);
    if (!chosen) throw std::runtime_error(reason.text);
    return *chosen;
  }
};
std::string quoted(const std::string& text) { return "\"" + text + "\""; }  // of names, which need no escapes
std::string describe_parameters(const Entry& e) {
  static const char* const kinds[] = {"int", "float", "bool", "str", "tensor", "tensor"};
  std::string json = ",\"parameters\":[";
  for (const Parameter& p : e.parameters) {
    json += std::string(json.back() == '[' ? "" : ",") + "{\"name\":" + quoted(p.name) + ",\"kind\":\"" +
            kinds[static_cast<int>(p.kind)] + "\",\"default\":" + std::to_string(p.otherwise) + ",\"words\":[";
    for (const std::string& word : p.words) json.append(json.back() == '[' ? "" : ",").append(quoted(word));
    json += std::string("],\"required\":") + (p.kind == Parameter::Kind::tensor ? "true}" : "false}");
  }
  return json + "]";
}
const char* registry_as_json() {
  static thread_local std::string json;
  json = std::string("{\"level\":\"") + level() + "\",\"onednn_wide_vector\":" + std::to_string(onednn_wide_vector()) +
         ",\"pair_products\":" + (level_has_pair_products() ? "true" : "false") +
         ",\"matrix_tiles\":" + (level_has_matrix_tiles() ? "true" : "false") +
         ",\"processor_has_matrix_tiles\":" + (processor_has_matrix_tiles() ? "true" : "false") + ",\"operations\":{";
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
          json += std::string(first_device ? "\"" : ",\"") + ops::name_of(d) + "\":{" + (*o)->describe(*info) +
                  describe_parameters(*e) + "}";
          first_device = false;
        }
      json += "}";
    }
    json += "}}";
  }
  json += "}}";
  return json.c_str();
}
}  // namespace

// The C interface, for Python (ctypes), for _C_cuda and for C++ programs. Every function returns 0 on failure and writes the
// reason into `error`; a positive or non-null result is success.
extern "C" {

AI3_EXPORT int ai3_register(const AlgorithmInfo* info, int replace, char* error, int64_t size) {
  return guarded(error, size, [&] { return add(*info, replace != 0), 1; });
}
// What the glue asks of CUDA; _C_cuda calls this when it is loaded.
AI3_EXPORT void ai3_set_cuda(void* (*current_stream)(int32_t device), bool (*is_capturing)(void* stream)) {
  current_cuda_stream = current_stream, is_cuda_capturing = is_capturing;
}
// `name` null or "": back to the rule.
AI3_EXPORT int ai3_set_default(const char* operation, const char* name, char* error, int64_t size) {
  return guarded(error, size, [&] {
    const Operation& o = operation_known(operation);
    o.state->preferred.store(name && *name ? &entry_named(o, name) : nullptr, std::memory_order_release);
    registrations.fetch_add(1, std::memory_order_release);
    return 1;
  });
}
// 1: supported; 0: `error` says why not.
AI3_EXPORT int ai3_supports(const char* operation, const char* name, const ai3_question* question, char* error, int64_t size) {
  return guarded(error, size, [&] { return Asked(operation, name, *question).select(), 1; });
}
// The name of the algorithm that runs: `name` itself unless it is a rule, which says into `error` why it chose it.
AI3_EXPORT const char* ai3_resolve(const char* operation, const char* name, const ai3_question* question, char* error,
                                   int64_t size) {
  return guarded(error, size, [&] {
    const char* why = "";
    const Entry& chosen = Asked(operation, name, *question).select(&why);
    if (error && size > 0) std::snprintf(error, static_cast<size_t>(size), "%s", why);
    return chosen.name.c_str();
  });
}
namespace {
struct Bytes {
  int64_t value = -1;
};
}  // namespace
// Bytes of workspace in a direct call, and of what the pack operator returns; -1 on failure.
AI3_EXPORT int64_t ai3_workspace(const char* operation, const char* name, const ai3_question* question, char* error,
                                 int64_t size) {
  return guarded(error, size,
                 [&] {
                   const Asked a(operation, name, *question);
                   return Bytes{a.entry.operation->workspace(a.entry, a.device, a.query)};
                 })
      .value;
}
AI3_EXPORT int64_t ai3_packed_bytes(const char* operation, const char* name, const ai3_question* question, char* error,
                                    int64_t size) {
  return guarded(error, size,
                 [&] {
                   const Asked a(operation, name, *question);
                   return Bytes{a.entry.operation->packed_bytes(a.entry, a.device, a.query)};
                 })
      .value;
}
// Calls an operator (without "ai3::") as the dispatcher does, for a program that has its arguments as stable values.
AI3_EXPORT int ai3_call(const char* name, StableIValue* stack, uint64_t arguments, uint64_t results, char* error, int64_t size) {
  return guarded(error, size, [&] {
    function_named(name)(stack, arguments, results);
    return 1;
  });
}
// What `guess` computes with, measured at the first call for a number of threads, or again: float32 operations and bytes per
// second.
AI3_EXPORT int ai3_machine(int threads, int again, double* flops, double* bytes, char* error, int64_t size) {
  return guarded(error, size, [&] {
    const Machine m = measure_machine(threads, again != 0);
    return *flops = m.flops, *bytes = m.bytes, 1;
  });
}
// JSON: {"level": ..., "onednn_wide_vector": int, "pair_products", "matrix_tiles": bool (whether kernels use them),
// "processor_has_matrix_tiles": bool, "operations": {name: {"sizes": "<names>", "algorithms": {name: {"CPU": {...},
// "CUDA": {...}}}}}}. Valid until the next call from the same thread.
AI3_EXPORT const char* ai3_registry(char* error, int64_t size) {
  return guarded(error, size, [] { return registry_as_json(); });
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
    for (auto o = __start_ai3_operations; o != __stop_ai3_operations; o++)
      for (int i = 0; i < (*o)->shared_count; i++) define_shared((*o)->shared[i]);
    for (auto o = __start_ai3_operators; o != __stop_ai3_operators; o++) define_shared(**o);
    for (auto a = __start_ai3_algorithms; a != __stop_ai3_algorithms; a++)
      if (wanted == (*a)->level || std::string("glue") == (*a)->level) add(**a, false);
    return 1;
  });
}

// The registry: operations, their algorithms on each device, and the dispatcher operators that call them.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "../../algos/core/algorithm.h"

namespace ai3::ops {

struct Entry;

// A schema, from its name or from its arguments on, with the numbers of its arguments and results.
struct Schema {
  const char* text;
  uint8_t arguments, results = 1;
  consteval Schema(const char* schema) : text(schema) {
    while (*schema != '(') schema++;
    arguments = counted(schema);
    while (*schema != '>') schema++;
    if (*(schema += 2) == '(') results = counted(schema);
  }

 private:
  // How many there are in the parentheses that begin at `at`, which is then behind them.
  static consteval uint8_t counted(const char*& at) {
    uint8_t count = 0;
    bool quoted = false, begun = false;  // in a string; in an argument
    int depth = 0;
    do {
      const char c = *at++;
      if (c == '"') quoted = !quoted;
      if (quoted) continue;
      if (depth == 1 && c == ',') begun = false;
      if (depth == 1 && !begun && c != ',' && c != ' ' && c != '*' && c != ')') begun = true, count++;
      depth += (c == '(' || c == '[') - (c == ')' || c == ']');
    } while (depth > 0);
    return count;
  }
};
// One kind of operator that each algorithm of an operation gets: the algorithm itself, its backward, packing, ...
struct OperatorKind {
  const char* prefix;  // "ai3::" + prefix + algorithm + suffix, e.g. "_conv2d_" "winograd" "_pack"
  const char* suffix;
  Schema signature;  // without the name
  void (*call)(const Entry&, StableIValue* stack);
  bool (*wanted)(const AlgorithmInfo&);  // null: every algorithm gets it
};
// An operator of the operation itself, which is told the algorithms by name.
struct SharedOperator {
  Schema schema;  // starts with the name
  void (*call)(StableIValue* stack);
};
// One that belongs to no operation; the list is an ELF section.
#define AI3_OPERATOR(name_, schema_, call_)                                                                             \
  constexpr ::ai3::ops::SharedOperator name_##_operator = {#name_ schema_, call_};                                      \
  [[gnu::section("ai3_operators"), gnu::used]] static const ::ai3::ops::SharedOperator* const name_##_operator_record = \
      &name_##_operator;

// Asked about a problem that Python describes as a flat list of sizes (-1: unknown), see each operation's `problem_from`. The
// rest is the same for all operations, and is put into those problems that have such a member.
struct Query {
  DType dtype;
  const int64_t* sizes;
  int count;
  const char* exclude = nullptr;  // as in Conv2dProblem
  bool allow_tf32 = false;
  const Parameters* parameters = nullptr;  // null: their defaults
};

// What is known about an operation at run time. Read without a lock: entries are only ever added, and never freed or moved.
struct OperationState {
  std::atomic<const Entry*> first{nullptr};      // all entries, linked by `next`
  std::atomic<const Entry*> preferred{nullptr};  // what `default` runs where it can instead of its rule, or null
};

struct Operation {
  const char* name;
  OperationState* state;
  const char* sizes;  // names of Query's sizes, space-separated: the contract with Python
  const OperatorKind* kinds;
  int kind_count;
  const SharedOperator* shared;
  int shared_count;
  const Entry* (*select)(const Entry&, Device, const Query&, Reason&, const char** why);  // what runs, see below
  int64_t (*workspace)(const Entry&, Device, const Query&);     // bytes, a direct call's packed weights included
  int64_t (*packed_bytes)(const Entry&, Device, const Query&);  // bytes of what the pack operator returns
  std::string (*describe)(const AlgorithmInfo&);                // JSON members of its traits
  const char* (*parameters)(const AlgorithmInfo&);              // of its traits, null where it has none
};
inline constexpr int kKindsAtMost = 9;
// Puts an operation into the registry's list; the list is an ELF section, as that of the algorithms.
#define AI3_OPERATION(name_, ...)                                                                                    \
  constinit ::ai3::ops::OperationState name_##_state;                                                                \
  constexpr ::ai3::ops::Operation name_##_operation = {#name_, &name_##_state, __VA_ARGS__};                         \
  static_assert(name_##_operation.kind_count <= ::ai3::ops::kKindsAtMost);                                           \
  [[gnu::section("ai3_operations"), gnu::used]] static const ::ai3::ops::Operation* const name_##_operation_record = \
      &name_##_operation;

// One parameter of an algorithm's own, as its record states it.
struct Parameter {
  enum class Kind { whole, real, flag, word, tensor, optional_tensor };
  Kind kind;
  std::string name, schema;        // "window", "int window=512"
  std::vector<std::string> words;  // of a word, those that are allowed
  int64_t otherwise;               // as in Parameters
};
AI3_INLINE bool is_tensor(const Parameter& p) { return p.kind >= Parameter::Kind::tensor; }
// Reads Traits::parameters; throws where they are not written as those are. Null has none.
std::vector<Parameter> parameters_of(const char* text);
// The place of a word among those that the parameter allows, or an error that names them.
int64_t word_of(const Parameter& parameter, const std::string& word);

// An algorithm's name with its implementation on each device.
struct Entry {
  const Operation* operation;
  std::string name;
  int slot;                       // of its operators' functions
  std::atomic<uint32_t> defined;  // bit k: has an operator of kind k
  const Entry* next;
  std::atomic<const AlgorithmInfo*> implementations[2];
  // The algorithm's own parameters, the same on every device and in every version, and their defaults.
  std::vector<Parameter> parameters;
  Parameters defaults;

  const AlgorithmInfo* on(Device device) const {
    return implementations[static_cast<int>(device)].load(std::memory_order_acquire);
  }
  template <class Problem>
  const Algorithm<Problem>* algorithm(Device device) const {
    return reinterpret_cast<const Algorithm<Problem>*>(on(device));
  }
};

inline const Entry* find(const Operation& operation, const char* name) {
  for (const Entry* e = operation.state->first.load(std::memory_order_acquire); e; e = e->next)
    if (std::strcmp(e->name.c_str(), name) == 0) return e;
  return nullptr;
}
// The operation, or an error that names it.
const Operation& operation_known(const char* name);
// Another number whenever something else may be chosen, as after every registration: what is kept about algorithms depends on it.
uint64_t generation();
// The entry, or an error that names it.
const Entry& entry_named(const Operation& operation, const std::string& name);
// All of them, by name.
std::vector<const Entry*> entries(const Operation& operation);
AI3_INLINE const char* name_of(Device d) { return d == Device::cpu ? "CPU" : "CUDA"; }

// Whether one of these patterns, between commas, in which * and ? stand for any characters and one, is that of the name.
bool matches_any(const char* patterns, const std::string& name);
template <class P>
const char* excludes(const P& p) {
  if constexpr (requires { p.exclude; }) return p.exclude ? " (some are excluded)" : "";
  return "";
}
template <class P>
bool is_excluded(const P& p, const std::string& name) {
  if constexpr (requires { p.exclude; }) return p.exclude && matches_any(p.exclude, name);
  return false;
}

// How many questions of this thread were not answered, but ended in an exception: what was decided without the answer, as when
// memory was missing, is not kept.
inline uint64_t& unanswered() {
  static thread_local uint64_t count = 0;
  return count;
}
// What an algorithm answers when `ask` asks it. One that throws instead supports nothing, so that a user's cannot take the others
// away.
template <class Ask>
auto answer(const char* what, Reason& reason, Ask&& ask) -> decltype(ask()) {
  try {
    return ask();
  } catch (const std::exception& e) {
    unanswered()++;
    refuse(reason, "%s", *e.what() ? e.what() : "an exception without words");
  } catch (...) {
    unanswered()++;
    refuse(reason, "an exception that is no std::exception came out of its `%s`", what);
  }
  return {};
}
template <class P>
bool supported(const Traits<P>& traits, const P& p, Reason& reason) {
  if (!traits.supports) return true;
  if (answer("supports", reason, [&] { return traits.supports(p, reason); })) return true;
  if (!*reason.text) refuse(reason, "does not support this case");  // a user's `supports` may say false alone
  return false;
}

// p with the parameters of an algorithm that another one chooses.
template <class P>
P with_parameters(P p, const Parameters& parameters) {
  if constexpr (requires { p.parameters; }) p.parameters = parameters;
  return p;
}

// The names of the activations in a set of bits (tensor/checks.cpp).
std::string activations_in(uint32_t bits, const char* between);

// What runs for p on `device`: `entry` itself or, where that is a rule, what it chooses. Null, with the reason, when `entry`
// cannot. `depth` rules have asked; `why`, where given, gets why a rule chose.
inline constexpr int kRulesAtMost = 8;
template <class P>
const Entry* select(const Entry& entry, Device device, const P& p, Reason& reason, int depth = 0, const char** why = nullptr) {
  reason.text[0] = '\0';
  const auto* a = entry.algorithm<P>(device);
  if (!a) return refuse(reason, "has no %s kernel", name_of(device)), nullptr;
  if (!(a->traits.dtypes & dtype_bit(p.dtype))) return refuse(reason, "does not compute in %s", ai3::name_of(p.dtype)), nullptr;
  if constexpr (requires { p.deterministic; })
    if (p.deterministic && !a->traits.deterministic)
      return refuse(reason, "is not deterministic, and a deterministic result was asked for"), nullptr;
  if constexpr (requires { p.has_prologue; })
    if (p.has_prologue && !a->traits.prologue && !a->traits.choose)
      return refuse(reason, "applies no scale, shift or relu to its input"), nullptr;
  if constexpr (requires { p.has_residual; })
    if ((p.has_residual || p.activation != Activation::none) && !a->traits.epilogue && !a->traits.choose)
      return refuse(reason, "fuses no residual and no activation"), nullptr;
  if constexpr (requires { p.activation; })
    if (!a->traits.choose && p.activation != Activation::none && !(a->traits.activations & activation_bit(p.activation)))
      return refuse(reason, "fuses no activation but %s", activations_in(a->traits.activations, " and ").c_str()), nullptr;
  if (!supported(a->traits, p, reason)) return nullptr;
  if (!a->traits.choose) return &entry;
  if (depth == kRulesAtMost) return refuse(reason, "follows rules that name one another"), nullptr;
  struct Context {
    const Operation* operation;
    Device device;
    int depth;
    const Entry* find(const P& p, const char* name) const {
      const Entry* e = is_excluded(p, name) ? nullptr : ops::find(*operation, name);
      Reason ignored;
      return e ? select(*e, device, with_parameters(p, e->defaults), ignored, depth) : nullptr;
    }
  } context{entry.operation, device, depth + 1};
  if (entry.name == "default")
    if (const Entry* preferred = entry.operation->state->preferred.load(std::memory_order_acquire);
        preferred && preferred != &entry && !is_excluded(p, preferred->name)) {
      Reason ignored;
      if (const Entry* chosen = select(*preferred, device, with_parameters(p, preferred->defaults), ignored, depth + 1)) {
        if (why) *why = "registered as what default runs";
        return chosen;
      }
    }
  const Candidates<P> candidates{
      &context,
      [](const void* c, const P& q, const char* name) { return static_cast<const Context*>(c)->find(q, name) != nullptr; },
      [](const void* c, const P& q, void* state, void (*visit)(void*, const char*, const Traits<P>&)) {
        const Context& in = *static_cast<const Context*>(c);
        for (const Entry* e = in.operation->state->first.load(std::memory_order_acquire); e; e = e->next) {
          const auto* candidate = e->template algorithm<P>(in.device);
          if (candidate && !candidate->traits.choose && in.find(q, e->name.c_str()))
            visit(state, e->name.c_str(), candidate->traits);
        }
      }};
  reason.text[0] = '\0';  // its `supports` may have written one and said yes
  const Choice choice = answer("choose", reason, [&] { return a->traits.choose(p, candidates); });
  if (*reason.text) return nullptr;
  const Entry* chosen = choice.algorithm ? context.find(p, choice.algorithm) : nullptr;
  if (why) *why = choice.why;
  if (!chosen)
    refuse(reason, "only chooses among other algorithms, and none that it may choose supports this case%s", excludes(p));
  return chosen;
}

// p as another algorithm of its operation would be asked: the call's own parameters, where they are not the defaults, mean
// something to those alone that have the same ones; nothing for others.
template <class P>
std::optional<P> asked_of(const Entry& other, const Entry& entry, const P& p) {
  if constexpr (requires { p.parameters; }) {
    const auto* const given = std::begin(p.parameters.values);
    if (!std::equal(given, std::end(p.parameters.values), std::begin(entry.defaults.values))) {
      auto same = [](const Parameter& a, const Parameter& b) { return a.name == b.name; };
      const auto &a = entry.parameters, &b = other.parameters;
      return std::equal(a.begin(), a.end(), b.begin(), b.end(), same) ? std::optional<P>(p) : std::nullopt;
    }
  }
  return with_parameters(p, other.defaults);
}

// The sentence for a refusal: what the operator needs and got, and who can do it.
template <class P>
[[noreturn]] void refused(const Entry& entry, Device device, const P& p, const Reason& reason) {
  std::string message = std::string("ai3::") + entry.operation->name + "_" + entry.name + ": " + reason.text +
                        "; algorithms that support this case: ";
  bool first = true;
  for (const Entry* e : entries(*entry.operation)) {
    Reason ignored;
    if (e == &entry) continue;
    const std::optional<P> other = asked_of(*e, entry, p);
    if (!other || !select(*e, device, *other, ignored)) continue;
    message += (first ? "" : ", ") + e->name;
    first = false;
  }
  if (first) message += "none";
  throw std::runtime_error(message);
}

// Operations with a weight say in their problem.h what its sizes are (`weight_sizes`), what a packed one may depend on
// (`pack_description`) and whether a query knows that much (`weight_known`).
template <class P>
concept HasWeight = requires(const P& p) {
  weight_sizes(p);
};

// The problem of a call that packs the weight itself.
template <class P>
P in_direct_call(const Traits<P>& traits, P p) {
  if constexpr (requires { p.packed_for_call; }) p.packed_for_call = traits.packed_bytes != nullptr;
  return p;
}
// p as the pack operator knows it, to which only the weight is given: an algorithm whose form of the weight depends on the layout
// or the precision of a call has none then.
template <class P>
P of_weight_alone(P p) {
  if constexpr (requires { p.allow_tf32; }) p.allow_tf32 = false;
  if constexpr (requires { p.x_stride; }) p.x_stride = p.y_stride = {};
  return p;
}
// Bytes of workspace in a direct call: the algorithm's own, and its packed weights.
template <class P>
int64_t packed_bytes_of(const Traits<P>& traits, const P& p) {  // 0: p's weight is read as it is
  return traits.packed_bytes ? round_up(traits.packed_bytes(p), 64) : 0;
}
template <class P>
int64_t pack_workspace_of(const Traits<P>& traits, const P& p) {
  return traits.pack_workspace ? traits.pack_workspace(p) : 0;
}
// Memory that packing takes serves the kernel afterwards.
template <class P>
int64_t workspace_bytes_of(const Traits<P>& traits, const P& p) {
  const P q = in_direct_call(traits, p);
  return checked_add(packed_bytes_of(traits, q),
                     std::max(traits.workspace ? traits.workspace(q) : 0, pack_workspace_of(traits, q)));
}

// What a copy of the weight, which algorithms without a form of their own take, is longer by. It depends on the weight's sizes,
// so that copies of as many elements differ in length: on CUDA a tag in the memory could be read only by waiting for the device.
int64_t mark_of(std::span<const int64_t> sizes);
// Bytes of the tensor that the pack operator returns, its tag included.
template <class P>
int64_t packed_tensor_bytes(const Traits<P>& traits, const P& p) {
  if constexpr (HasWeight<P>) {
    if (const int64_t bytes = packed_bytes_of(traits, p)) return checked_add(bytes, 64);
    const auto sizes = weight_sizes(p);
    int64_t bytes = size_of(p.dtype);
    for (const int64_t size : sizes) bytes = checked_mul(bytes, size);
    return checked_add(checked_add(round_up(bytes, 64), mark_of(sizes)), 64);
  }
  return 0;
}

// JSON members of the traits that are the same for every operation.
struct TraitsRecord {
  Accuracy accuracy;
  double error_bound;
  Layout layout;
  uint32_t dtypes, activations;
  bool deterministic, epilogue, prologue, sliced, own_gradients, packs, rule, vendor;
};
std::string describe_traits(const TraitsRecord& traits);
template <class P>
std::string describe(const AlgorithmInfo& info) {
  const auto& t = reinterpret_cast<const Algorithm<P>&>(info).traits;
  return describe_traits({t.accuracy, t.error_bound, t.layout, t.dtypes, t.epilogue ? t.activations : 0, t.deterministic,
                          t.epilogue, t.prologue, t.sliced, t.gradients != nullptr, t.packed_bytes != nullptr,
                          t.choose != nullptr, t.tensors != nullptr});
}
template <class P>
const char* own_parameters(const AlgorithmInfo& info) {
  const char* const text = reinterpret_cast<const Algorithm<P>&>(info).traits.parameters;
  if constexpr (!requires(const typename P::Operands& m) { m.own; })
    if (text && std::strstr(text, "Tensor"))
      throw std::runtime_error(std::string("ai3: algorithms of ") + info.operation + " have no tensors among their parameters");
  return text;
}
// The functions of an Operation over its problem struct, given `P problem_from(const Query&)`.
template <class P, P (*problem_from)(const Query&)>
struct Queries {
  static P problem(const Entry& e, const Query& q) {
    P p = problem_from(q);
    if constexpr (requires { p.exclude; }) p.exclude = q.exclude;
    if constexpr (requires { p.allow_tf32; }) p.allow_tf32 = q.allow_tf32;
    return with_parameters(p, q.parameters ? *q.parameters : e.defaults);
  }
  static const Entry* select(const Entry& e, Device d, const Query& q, Reason& reason, const char** why) {
    return ops::select(e, d, problem(e, q), reason, 0, why);
  }
  static int64_t workspace(const Entry& e, Device d, const Query& q) {
    const P p = problem(e, q);
    Reason reason;
    const Entry* chosen = ops::select(e, d, p, reason);
    if (!chosen) throw std::runtime_error(reason.text);
    if (!sizes_known(p)) throw std::runtime_error("needs every size for its workspace, got some that are not known");
    return workspace_bytes_of(chosen->algorithm<P>(d)->traits, chosen == &e ? p : with_parameters(p, chosen->defaults));
  }
  static int64_t packed_bytes(const Entry& e, Device d, const Query& q) {
    const auto* a = e.algorithm<P>(d);
    const P p = problem(e, q);
    if constexpr (HasWeight<P>)
      if (!weight_known(p)) throw std::runtime_error("needs the weight's sizes for its pack, got some that are not known");
    return a ? packed_tensor_bytes(a->traits, of_weight_alone(p)) : 0;
  }
};
#define AI3_QUERIES(P, problem_from)                                                             \
  ::ai3::ops::Queries<P, problem_from>::select, ::ai3::ops::Queries<P, problem_from>::workspace, \
      ::ai3::ops::Queries<P, problem_from>::packed_bytes, ::ai3::ops::describe<P>, ::ai3::ops::own_parameters<P>

// Of an exception of a user's algorithm that is none of the standard library's.
inline constexpr char kNoWords[] = "an exception that is no std::exception, so that nothing is known about it";

// What a function of the C interface returns: the body's result or, where that throws, nothing, with the reason in `error`.
template <class Body>
auto guarded(char* error, int64_t size, const Body& body) -> decltype(body()) {
  auto tell = [&](const char* what) {
    if (error && size > 0) std::snprintf(error, static_cast<size_t>(size), "%s", what);
  };
  try {
    return body();
  } catch (const std::exception& e) {
    tell(e.what());
  } catch (...) {  // from a user's `supports`, `workspace` or `cost`
    tell(kNoWords);
  }
  return {};
}

}  // namespace ai3::ops

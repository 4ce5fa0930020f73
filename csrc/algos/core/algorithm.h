// What an algorithm tells the registry about itself. A kernel file, built-in or a user's, includes
// its operation's problem, and with it this:
//
//   #include <ai3/conv2d.h>
//   template <class T>
//   void conv2d_mine(const ai3::Conv2dProblem& p, const T* x, const T* w, const T* b, T* y, ai3::Workspace& workspace) { ... }
//   AI3_ALGORITHM(conv2d, mine)
//
// The macro takes designated initializers of ai3::Traits for what is not the default:
//   AI3_ALGORITHM(conv2d, mine, .supports = mine_supports, .workspace = mine_workspace)
#pragma once
#include <cstdint>
#include <cstdio>

#include "checked.h"
#include "dtype.h"
#include "isa.h"
#include "operands.h"
#include "parallel.h"
#include "problem.h"
#include "simd.h"

namespace ai3 {

// Raised when this file changes in a way that old binaries of users' algorithms cannot follow.
inline constexpr int32_t kAlgorithmAbi = 8;

enum class Accuracy : int32_t {
  exact,       // rounds only as a sum of products does: gamma_K * sum |x||w| (Higham), exact on small integers
  bounded,     // rounds differently (Winograd, FFT): max|y - y64| <= error_bound * max|y64| in float32
  approximate  // computes something else than asked, or in fewer bits: never picked unasked
};
enum class Layout : int32_t { any, nchw, nhwc };  // what x and y must be; the glue converts. `any` reads the problem's strides
enum class Device : int32_t { cpu, cuda };

inline constexpr uint32_t kAllDtypes = 15;
AI3_INLINE constexpr uint32_t dtype_bit(DType t) { return 1u << static_cast<int>(t); }

// Why an algorithm cannot do a problem: one clause, as in "needs a 3x3 kernel with stride 1, got kernel (5, 5)".
struct Reason {
  char text[320];
};
// For `return refuse(reason, "needs groups == 1, got %lld", ...)`.
template <class... Arguments>
AI3_INLINE bool refuse(Reason& reason, const char* format, Arguments... arguments) {
  std::snprintf(reason.text, sizeof(reason.text), format, arguments...);
  return false;
}

// The bytes that Workspace::take<T>(count) uses.
template <class T>
AI3_INLINE int64_t workspace_bytes(int64_t count) {
  return round_up(checked_mul(count, static_cast<int64_t>(sizeof(T))), 64);
}
// Scratch memory of the size that the algorithm asked for, 64-byte aligned, not initialized.
struct Workspace {
  char* data;
  int64_t bytes;
  int64_t used;
  void* stream;                                          // CUDA: the current cudaStream_t
  char* (*borrow)(Workspace&, int64_t bytes) = nullptr;  // for what was not stated: memory that lives as long as the call
  // The next `count` elements. Of more bytes than the algorithm's `workspace` stated, those beyond are borrowed, so that the
  // kernel comes to its end whatever thread it runs on; the operator then raises an error instead of returning the output.
  template <class T>
  AI3_INLINE T* take(int64_t count) {
    const int64_t size = workspace_bytes<T>(count), first = used;
    used = checked_add(used, size);
    if (used > bytes) [[unlikely]]
      return borrow ? reinterpret_cast<T*>(borrow(*this, size)) : nullptr;
    return reinterpret_cast<T*>(data + first);
  }
};
// What `guess` models a time from.
struct Cost {
  double flops;       // executed, not effective
  double bytes;       // moved to and from memory
  double efficiency;  // share of the peak that the method's inner loop reaches
};

template <class Problem>
struct Traits;
// What a rule names: an algorithm of the operation, null where none will do, and in a few words why. Strings that stay.
struct Choice {
  const char* algorithm;
  const char* why = "";
};
// What a rule may choose from: the other algorithms of the operation on the problem's device.
template <class Problem>
struct Candidates {
  const void* context;
  bool (*usable)(const void* context, const Problem&, const char* name);
  void (*all)(const void* context, const Problem&, void* state,
              void (*visit)(void* state, const char* name, const Traits<Problem>&));

  // Whether the algorithm of that name supports p.
  AI3_INLINE bool operator()(const Problem& p, const char* name) const { return usable(context, p, name); }
  // visit(name, traits) for every algorithm that supports p, by name; rules are left out.
  template <class Visit>
  AI3_INLINE void each(const Problem& p, const Visit& visit) const {
    all(context, p, const_cast<Visit*>(&visit),
        [](void* state, const char* name, const Traits<Problem>& traits) { (*static_cast<const Visit*>(state))(name, traits); });
  }
};

// Who computes the gradients of input and weight: an algorithm of the operation, or PyTorch's own operators where null.
struct GradientNames {
  const char *input, *weight;
};

// The function that puts a weight into an algorithm's own form: of pointers alone, or with a workspace.
template <class Problem>
struct Packer {
  using Plain = void (*)(const Problem&, const void* weight, void* packed);
  using Whole = void (*)(const Problem&, const Operand& weight, const Operand& packed, Workspace&);
  Plain plain = nullptr;
  Whole whole = nullptr;

  constexpr Packer(decltype(nullptr) = nullptr) {}  // NOLINT: none
  template <class F>
  requires requires(F f) { static_cast<Plain>(f); }
  constexpr Packer(F f) : plain(f) {}  // NOLINT: a function is a packer
  template <class F>
  requires requires(F f) { static_cast<Whole>(f); }
  constexpr Packer(F f) : whole(f) {}  // NOLINT: a function is a packer
  AI3_INLINE explicit operator bool() const { return plain || whole; }
  AI3_INLINE void operator()(const Problem& p, const Operand& weight, const Operand& packed, Workspace& workspace) const {
    if (whole) return whole(p, weight, packed, workspace);
    plain(p, weight.data, packed.data);
  }
};

template <class Problem>
struct Traits {
  Accuracy accuracy = Accuracy::exact;
  double error_bound = 0;  // with Accuracy::bounded
  bool deterministic = true;
  Layout layout = Layout::any;
  uint32_t dtypes = kAllDtypes;
  bool epilogue = false;       // adds the residual, which may lie where the output does, and applies the activation
  uint32_t activations = ~0u;  // those that it applies, a bit each
  // False, with the reason, for what the method cannot do. Sizes may be -1 (unknown): then only what no size could mend.
  bool (*supports)(const Problem&, Reason&) = nullptr;
  int64_t (*workspace)(const Problem&) = nullptr;  // bytes; null: none
  Cost (*cost)(const Problem&) = nullptr;
  // For an algorithm that reads its weights in a form of its own: its bytes, and the packer. Neither may depend on batch,
  // in_height or in_width. `run` then always gets the packed weights: a direct call packs first.
  int64_t (*packed_bytes)(const Problem&) = nullptr;
  Packer<Problem> pack = nullptr;
  int64_t (*pack_workspace)(const Problem&) = nullptr;  // bytes; null: none
  // A rule instead of a kernel: names another algorithm of the operation.
  Choice (*choose)(const Problem& p, const Candidates<Problem>& usable) = nullptr;
  // Instead of a kernel: calls PyTorch's own operators on the glue's tensors (csrc/ops/<operation>/, which defines `call`).
  void (*tensors)(const Problem& p, void* call) = nullptr;
  GradientNames (*gradients)(const Problem&) = nullptr;  // null: PyTorch's, whatever the problem
  // A kernel for the gradients that are asked of this algorithm, with its workspace. Without one they are computed by `run` on
  // the transposed problems. The bias's gradient is wanted only beside the weight's.
  void (*backward)(const Problem&, const typename Problem::Gradients&, Workspace&) = nullptr;
  int64_t (*backward_workspace)(const Problem&, const typename Problem::Gradients&) = nullptr;
  bool prologue = false;  // applies scale, shift and input_relu to what it reads, before padding (core/prologue.h)
  // Also reads and writes slices: x and y have the dense strides of tensors with more channels, or longer rows.
  bool sliced = false;
  // The algorithm's own parameters, as the end of its operators' schema: "int window=512, float softcap=0.0, bool causal=False".
  // Of a word, what it may be: "str(counter|hf_eval) random=counter". Their values are in the problem, in this order.
  const char* parameters = nullptr;
};

// The registry's record; what it starts with is the same for every operation, so that one list can hold all of them.
struct AlgorithmInfo {
  int32_t abi;
  Device device;
  const char *operation, *name, *level;
};
template <class P>
struct Algorithm {
  AlgorithmInfo info;
  Traits<P> traits;
  void (*run)(const P&, const typename P::Operands&, Workspace&);  // null for rules and PyTorch's own operators
};

// body.operator()<T>() for the storage type that `dtype` names. Kernels that only tests of float32 run are compiled for nothing
// else.
template <class Body>
AI3_INLINE auto with_type([[maybe_unused]] DType dtype, const Body& body) {
#ifdef AI3_ONLY_FLOAT32
  return body.template operator()<float>();
#else
  switch (dtype) {
    case DType::f64: return body.template operator()<double>();
    case DType::bf16: return body.template operator()<bfloat16>();
    case DType::f16: return body.template operator()<float16>();
    default: return body.template operator()<float>();
  }
#endif
}

#if defined(__CUDACC__) || defined(AI3_ON_CUDA)  // the latter in what the host's compiler reads of a library for CUDA
inline constexpr Device kDevice = Device::cuda;
#else
inline constexpr Device kDevice = Device::cpu;
#endif

}  // namespace ai3

// Lists are ELF sections: each record's address is constant data, so nothing runs at load time (code of a level that the
// processor lacks must not) and no order of initialization matters. See docs/decisions/registration.md.
#define AI3_REGISTER_(operation_, name_, run_, ...)                                                                      \
  constinit const ::ai3::Algorithm<::ai3::problem_of::operation_> operation_##_##name_##_algorithm = {                   \
      {::ai3::kAlgorithmAbi, ::ai3::kDevice, #operation_, #name_, AI3_STRINGIZE(AI3_LEVEL)}, {__VA_ARGS__}, run_};       \
  [[gnu::section("ai3_algorithms"), gnu::used]] static const ::ai3::AlgorithmInfo* const operation_##_##name_##_record = \
      &operation_##_##name_##_algorithm.info;

// A kernel: a function template <operation>_<name><T>, in one of these forms (`weight` is the packed one where it packs):
//   (const Problem&, const T* x, const T* w, const T* b, T* y, ai3::Workspace&)      conv2d, linear
//   (const Problem&, const T* x, T* y, ai3::Workspace&)                              pools, relu, flatten
//   (const Problem&, const Problem::Operands&, ai3::Workspace&)                      any, also with residual or packed weights
#define AI3_ALGORITHM(operation_, name_, ...)                                                                    \
  AI3_REGISTER_(operation_, name_,                                                                               \
                (+[](const ::ai3::problem_of::operation_& p, const ::ai3::problem_of::operation_::Operands& m,   \
                     ::ai3::Workspace& workspace) {                                                              \
                  ::ai3::with_type(p.dtype, [&]<class T>() {                                                     \
                    if constexpr (requires { operation_##_##name_<T>(p, m, workspace); })                        \
                      operation_##_##name_<T>(p, m, workspace);                                                  \
                    else                                                                                         \
                      m.plain<T>([&](auto... pointers) { operation_##_##name_<T>(p, pointers..., workspace); }); \
                  });                                                                                            \
                }),                                                                                              \
                __VA_ARGS__)

// A rule that names another algorithm (.choose), or PyTorch's own operators (.tensors).
#define AI3_ALGORITHM_WITHOUT_KERNEL(operation_, name_, ...) AI3_REGISTER_(operation_, name_, nullptr, __VA_ARGS__)

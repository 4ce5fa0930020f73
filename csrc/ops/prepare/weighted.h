// What operations with a weight share: their calls, and the operators for output, gradients and packed weights.
#pragma once
#include "../dispatch/hash.h"
#include "slots.h"

namespace ai3::ops {

// The arguments of one call, for the glue and for the algorithms that call PyTorch's own operators.
struct WeightedCall {
  Tensor input, weight;  // the weight is a packed one where weight_size is given
  Sizes weight_size;
  Slot slot;                 // of the weight's packs, where they are kept
  bool cast_weight = false;  // weight and bias may have another dtype, as under autocast: what is kept is cast once
  std::optional<Tensor> bias, residual;
  Activation activation = Activation::none;
  std::optional<Tensor> slope;  // of the activation
  bool allow_tf32 = false, deterministic = false;
  std::optional<Parameters> parameters;      // of the algorithm's own; without, their defaults
  std::string exclude;                       // patterns of algorithms that a rule may not choose, between commas
  std::optional<Tensor> output;              // where to write, when it is given
  std::optional<Tensor> workspace;           // memory for it, when it is given
  std::optional<Tensor> result;              // what an algorithm of PyTorch's operators leaves
  const AlgorithmInfo* algorithm = nullptr;  // for algorithms of PyTorch's operators: their own record

  void take_options(Arguments& in) { allow_tf32 = in.take<bool>(), deterministic = in.take<bool>(); }
  const char* excluded() const { return exclude.empty() ? nullptr : exclude.c_str(); }
  // Arguments between the tensors and the rest, and a packed operator's for its input, where the operation has some.
  void take_window(Arguments&) {}
  void take_prologue(Arguments&) {}
};

// Checks dtypes and devices; casts the bias where the weight may be cast.
inline void check_weight(const Entry& asked, WeightedCall& c) {
  if (!c.cast_weight) return check_same(asked, c.input, c.weight, "weight");
  check(c.input.defined() && c.weight.defined(), asked, "needs tensors as input and weight, got None");
  dtype_of(asked, c.weight);
  check(c.input.device() == c.weight.device(), asked, "needs weight on the device of the input, got ", device_text(c.input),
        " and ", device_text(c.weight));
  if (c.bias && c.bias->scalar_type() != c.input.scalar_type()) c.bias = torch::stable::to(*c.bias, c.input.scalar_type());
}

// A model's packs take memory in proportion to its weights: the spectra of a 1x1 weight do not, and are made for each call.
inline bool affordable(int64_t pack_bytes, const Tensor& weight) {
  constexpr int64_t factor = 8, slack = int64_t{1} << 20;
  return pack_bytes <= factor * weight.numel() * std::max<int64_t>(4, static_cast<int64_t>(weight.element_size())) + slack;
}

// The multiplications of a call, of a convolution as if its strides were 1.
inline int64_t products_of(const WeightedCall& c) {
  const int64_t channels = c.weight.dim() > 2 ? c.input.size(1) : c.input.size(c.input.dim() - 1);
  return channels > 0 ? c.input.numel() / channels * c.weight.numel() : 0;
}

// The weight as the kernel reads it, and whether that is the packed form: from the call's slot where it has one.
struct ReadyWeight {
  Tensor tensor;
  bool packed;
};
template <class P>
ReadyWeight ready_weight(const Prepared<P>& call, const WeightedCall& c, std::span<const int64_t> description) {
  const bool packs = call.pack > 0, same = c.weight.scalar_type() == c.input.scalar_type();
  if (c.slot && (packs || !same || !is_contiguous(c.weight)) && (!packs || affordable(call.pack, c.weight))) {
    const PackKey key{&call.algorithm->info, Hash().add(description).value(), c.input.scalar_type(), packs};
    if (auto pack = kept(c.slot, key, c.weight, products_of(c),
                         [&](const Tensor& w) { return packs ? pack_weight(call, call.problem, w, description) : w; }))
      return {*pack, packs};
  }
  const Tensor weight = as_contiguous(c.weight);
  return {same ? weight : torch::stable::to(weight, c.input.scalar_type()), false};
}

// For algorithms of PyTorch's operators: the weight in the input's dtype, kept in the slot; what they keep of it themselves goes
// by the version of the weight that was given.
template <class P>
void convert_weight(const Prepared<P>& call, WeightedCall& c, std::span<const int64_t> description) {
  if (c.weight.scalar_type() == c.input.scalar_type()) return;
  if (c.slot) c.slot.version = version_of(c.slot, c.weight);
  c.weight = ready_weight(call, c, description).tensor;
}

// The slopes of the activation as kernels read them: one for each output channel, of the type that they accumulate in.
inline std::optional<Tensor> slope_for(const Entry& asked, const WeightedCall& c, int64_t channels) {
  const bool wanted = has_slope(c.activation);
  check(wanted == c.slope.has_value(), asked, "needs ", wanted ? "a slope for this activation" : "no slope for this activation");
  if (!wanted) return std::nullopt;
  const bool wide = c.input.scalar_type() == ScalarType::Double;
  const Tensor& given = *c.slope;
  check(given.dim() == 1 && (given.size(0) == 1 || given.size(0) == channels) &&
            given.scalar_type() == (wide ? ScalarType::Double : ScalarType::Float) && given.device() == c.input.device(),
        asked, "needs a slope of 1 or ", channels, wide ? " float64" : " float32", " elements on the input's device, got ",
        given);
  const Tensor slope =
      as_contiguous(given.size(0) == channels ? given : call_aten("aten::expand", "", given, Sizes{channels}, false));
  if (c.output) check_apart(asked, *c.output, given, "slope"), check_workspace(asked, c.workspace, {{&given, "slope"}});
  return slope;
}

// Checks the residual and where the output goes. `sizes` are the output's.
inline void check_places(const Entry& asked, const WeightedCall& c, const Sizes& sizes) {
  if (c.residual) check_place(asked, c.input, *c.residual, sizes, "residual");
  if (!c.output) return;
  check_place(asked, c.input, *c.output, sizes, "out");
  check_apart(asked, *c.output, c.input, "input");
  check_apart(asked, *c.output, c.weight, c.weight_size.empty() ? "weight" : "the packed weight");
  if (c.bias) check_apart(asked, *c.output, *c.bias, "bias");
  if (c.residual && !same_place(*c.output, *c.residual)) check_apart(asked, *c.output, *c.residual, "residual");
  check_workspace(asked, c.workspace,
                  {{&c.input, "input"},
                   {&*c.output, "out"},
                   {&c.weight, "weight"},
                   {c.bias ? &*c.bias : nullptr, "bias"},
                   {c.residual ? &*c.residual : nullptr, "residual"}});
}

// The residual as a kernel reads it, with the strides of y, to which it writes: itself or, where y is dense, a copy; where y is a
// slice, y is given the residual's values.
template <class Dense>
Tensor residual_for(const Tensor& residual, const Tensor& y, bool y_is_slice, const Dense& dense) {
  if (same_strides(residual, y)) return residual;
  if (!y_is_slice) return dense(residual);
  Tensor to = y;
  torch::stable::copy_(to, residual);
  return to;
}

// An operator that fuses: by its kernel, or by that of what a rule chooses.
template <class P>
bool fuses(const AlgorithmInfo& info) {
  const auto& t = reinterpret_cast<const Algorithm<P>&>(info).traits;
  return t.epilogue || t.prologue || t.choose;
}

// The boxed functions of an operation. O has the types Call (a WeightedCall) and Problem, weight_rank, and the functions
//   Problem problem(const Entry&, Call&)               of an unpacked call
//   Problem problem_of_weight(const Entry&, Call&)     whose input is not known yet
//   array description(const Problem&)                  what a pack may depend on
//   Tensor run(const Entry&, Call&)
//   Gradients gradients(const Entry& asked, Call&, grad, wanted, GradientEntries)
//   const Operation& operation()
template <class O>
struct WeightedOperators {
  using Call = typename O::Call;
  using Problem = typename O::Problem;

  static Call forward_call(Arguments& in) {
    Call c;
    c.input = in.take<Tensor>(), c.weight = in.take<Tensor>(), c.bias = in.take<std::optional<Tensor>>();
    c.take_window(in);
    return c;
  }
  static void forward(const Entry& entry, StableIValue* stack) {
    Arguments in(stack);
    Call c = forward_call(in);
    c.take_options(in), c.parameters = in.take_parameters(entry);
    give(stack, 0, O::run(entry, c));
  }

  // Whose algorithms those are that compute gradients.
  static const Operation& of_gradients() {
    if constexpr (requires { O::gradient_operation(); })
      return O::gradient_operation();
    else
      return O::operation();
  }
  // What computes the gradients of input and weight as the algorithm has it, null where PyTorch does.
  static GradientEntries own_gradients(const Entry& asked, Call c) {
    Problem p = O::problem(asked, c);
    p.deterministic = false;  // what runs is asked again, and PyTorch's gradients are none of the algorithm's affair
    const auto gradients = Chosen<Problem>(asked, device_of(asked, c.input), p).algorithm->traits.gradients;
    const GradientNames names = gradients ? gradients(p) : GradientNames{};
    auto entry = [](const char* name) { return name ? &entry_named(of_gradients(), name) : nullptr; };
    return {entry(names.input), entry(names.weight)};
  }
  struct BackwardArguments {
    explicit BackwardArguments(Arguments& in) : grad(in.take<Tensor>()) {
      call.input = in.take<Tensor>(), call.weight = in.take<Tensor>();
      call.take_window(in);
      wanted = in.take<std::vector<bool>>();
    }
    Tensor grad;
    Call call;
    std::vector<bool> wanted;
  };
  static void backward(const Entry& entry, StableIValue* stack) {
    Arguments in(stack);
    BackwardArguments a(in);
    a.call.take_options(in), a.call.parameters = in.take_parameters(entry);
    give_gradients(stack, O::gradients(entry, a.call, a.grad, a.wanted, own_gradients(entry, a.call)));
  }

  // The algorithms of output and gradients by name; "" for a gradient: as ai3::_<operation>_<forward>_backward computes it.
  using Names = std::array<std::string, 3>;
  static Names names(Arguments& in) { return {in.take<std::string>(), in.take<std::string>(), in.take<std::string>()}; }
  static void mixed(StableIValue* stack) {
    Arguments in(stack);
    Call c = forward_call(in);
    c.take_options(in);
    const Names by = names(in);
    c.exclude = in.take<std::string>();
    c.slot.id = in.take<int64_t>();
    give(stack, 0, O::run(entry_named(O::operation(), by[0]), c));
  }
  static void mixed_backward(StableIValue* stack) {
    Arguments in(stack);
    BackwardArguments a(in);
    a.call.take_options(in);
    const Names by = names(in);
    a.call.exclude = in.take<std::string>();
    const Entry& asked = entry_named(O::operation(), by[0]);
    GradientEntries entries{};
    if (by[1].empty() || by[2].empty()) entries = own_gradients(asked, a.call);
    for (size_t i : {0u, 1u})
      if (!by[i + 1].empty()) entries[i] = &entry_named(of_gradients(), by[i + 1]);
    give_gradients(stack, O::gradients(asked, a.call, a.grad, a.wanted, entries));
  }

  static void pack(const Entry& entry, StableIValue* stack) {
    Arguments in(stack);
    Call c;
    c.weight = in.take<Tensor>();
    c.take_window(in), c.parameters = in.take_parameters(entry);
    Problem p = O::problem_of_weight(entry, c);
    p = of_weight_alone(with_parameters(p, *c.parameters));
    const Chosen<Problem> chosen(entry, device_of(entry, c.weight), p);
    give(stack, 0, pack_weight(chosen, p, c.weight, O::description(p)));
  }
  // What a swapped module calls in eager inference. `version` is the weight's, as Slot has it.
  static void infer(const Entry& entry, StableIValue* stack) {
    Arguments in(stack, true);
    Call c = forward_call(in);
    c.deterministic = in.take<bool>(), c.allow_tf32 = in.take<bool>(), c.cast_weight = in.take<bool>();
    c.slot.id = in.take<int64_t>();
    c.parameters = in.take_parameters(entry), c.slot.version = in.take_from_stack<int64_t>();
    check_inference(entry);
    give(stack, 0, O::run(entry, c));
  }
  // The same in compiled and exported programs, with gradients.
  static void held(const Entry& entry, StableIValue* stack) {
    Arguments in(stack);
    Call c = forward_call(in);
    c.slot.id = in.take<int64_t>();
    c.take_options(in);
    c.cast_weight = in.take<bool>(), c.parameters = in.take_parameters(entry);
    give(stack, 0, O::run(entry, c));
  }
  // Of a weight as it is or packed; the output is returned or written to `out`.
  template <bool packed, bool with_out>
  static void fused(const Entry& entry, StableIValue* stack) {
    Arguments in(stack);
    Call c;
    c.input = in.take<Tensor>(), c.weight = in.take<Tensor>();
    if (packed) c.weight_size = in.take<Sizes>();
    c.bias = in.take<std::optional<Tensor>>();
    c.take_window(in);
    c.residual = in.take<std::optional<Tensor>>();
    const std::string activation = in.take<std::string>();
    c.slope = in.take<std::optional<Tensor>>();
    c.take_prologue(in);
    c.take_options(in);
    if (with_out) c.output = in.take<Tensor>(), c.workspace = in.take<std::optional<Tensor>>();
    c.parameters = in.take_parameters(entry);
    check(!packed || c.weight_size.size() == O::weight_rank, entry, "needs the ", O::weight_rank, " sizes of the weight, got ",
          c.weight_size);
    c.activation = activation_named(entry, activation);
    if (with_out) mark_written(entry, *c.output);
    const Tensor output = O::run(entry, c);
    if (!with_out) give(stack, 0, output);
  }
};

// The tables of an operation's operators, `kinds` and `shared`. `window` are the arguments that take_window takes, with their
// defaults, and, without, as gradients have them; `prologue` those of take_prologue. Each begins with a comma.
#define AI3_OPTIONS ", *, bool allow_tf32=False, bool deterministic=False"
#define AI3_FORWARD(window) "(Tensor input, Tensor weight, Tensor? bias=None" window AI3_OPTIONS
#define AI3_HELD(window) "(Tensor input, Tensor weight, Tensor? bias" window ", int slot" AI3_OPTIONS ", bool cast_weight=False"
#define AI3_GRADIENTS(window) "(Tensor grad_output, Tensor input, Tensor weight" window ", bool[3] output_mask" AI3_OPTIONS
#define AI3_NAMES ", str forward, str backward_input=\"\", str backward_weight=\"\", str exclude=\"\""
#define AI3_FUSED(weight, window, prologue)             \
  "(Tensor input, " weight ", Tensor? bias=None" window \
  ", Tensor? residual=None, str activation=\"none\", Tensor? slope=None" prologue AI3_OPTIONS
#define AI3_OUT ", Tensor(a!) out, Tensor(b!)? workspace=None"
#define AI3_PACKED(window, prologue) AI3_FUSED("Tensor packed, int[] weight_size", window, prologue)
#define AI3_WEIGHTED_OPERATORS(operation, O, window, gradient_window, prologue)                                               \
  constexpr OperatorKind kinds[] = {                                                                                          \
      {operation "_", "", AI3_FORWARD(window) ") -> Tensor", WeightedOperators<O>::forward, nullptr},                         \
      {"_" operation "_", "_backward", AI3_GRADIENTS(gradient_window) ") -> (Tensor, Tensor, Tensor)",                        \
       WeightedOperators<O>::backward, nullptr},                                                                              \
      {"_" operation "_", "_pack", "(Tensor weight" window ") -> Tensor", WeightedOperators<O>::pack, has_packs<O::Problem>}, \
      {"_" operation "_", "_packed", AI3_PACKED(window, prologue) ") -> Tensor", WeightedOperators<O>::fused<true, false>,    \
       has_packs<O::Problem>},                                                                                                \
      {"_" operation "_", "_packed_out", AI3_PACKED(window, prologue) AI3_OUT ") -> ()",                                      \
       WeightedOperators<O>::fused<true, true>, has_packs<O::Problem>},                                                       \
      {"_" operation "_", "_fused", AI3_FUSED("Tensor weight", window, prologue) ") -> Tensor",                               \
       WeightedOperators<O>::fused<false, false>, fuses<O::Problem>},                                                         \
      {"_" operation "_", "_out", AI3_FUSED("Tensor weight", window, prologue) AI3_OUT ") -> ()",                             \
       WeightedOperators<O>::fused<false, true>, nullptr},                                                                    \
      {"_" operation "_", "_infer", "(Tensor input, Tensor weight, Tensor? bias, int numbers, int version) -> Tensor",        \
       WeightedOperators<O>::infer, is_method<O::Problem>},                                                                   \
      {"_" operation "_", "_held", AI3_HELD(gradient_window) ") -> Tensor", WeightedOperators<O>::held, nullptr},             \
  };                                                                                                                          \
  constexpr SharedOperator shared[] = {                                                                                       \
      {"_" operation "_mixed" AI3_FORWARD(window) AI3_NAMES ", int slot=0) -> Tensor", WeightedOperators<O>::mixed},          \
      {"_" operation "_mixed_backward" AI3_GRADIENTS(gradient_window) AI3_NAMES ") -> (Tensor, Tensor, Tensor)",              \
       WeightedOperators<O>::mixed_backward},                                                                                 \
  };

}  // namespace ai3::ops

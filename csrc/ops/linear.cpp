// ai3::linear_<algorithm>: schema, checks, and the way from tensors to kernels.
#include "linear.h"

namespace ai3::ops {
namespace {

LinearProblem problem_from(const Query& q) {
  if (q.count != 4) throw std::runtime_error("ai3: a linear query needs 4 sizes");
  LinearProblem p{};
  p.dtype = q.dtype, p.threads = threads();
  p.rows = q.sizes[0], p.in_features = q.sizes[1], p.out_features = q.sizes[2], p.has_bias = q.sizes[3] != 0;
  return p;
}

// What a pack may depend on.
Sizes pack_description(const LinearProblem& p) { return {static_cast<int64_t>(p.dtype), p.in_features, p.out_features}; }
const Operation& operation();

// Checks the arguments as torch.nn.functional.linear does; `sizes` get the output's.
LinearProblem linear_problem(const Entry& entry, LinearCall& c, const Sizes& weight, Sizes& sizes) {
  sizes = sizes_of(c.input);
  check(!sizes.empty(), entry, "needs input of at least one dimension");
  check(weight.size() == 1 || weight.size() == 2, entry, "needs a weight (out_features, in_features) or (in_features,), got ",
        to_string(weight));
  const int64_t in_features = sizes.back();
  check(in_features == weight.back(), entry, "needs input of ", weight.back(), " features in its last dimension, got ",
        to_string(sizes));
  LinearProblem p{};
  p.dtype = dtype_of(entry, c.input), p.threads = threads();
  p.in_features = in_features, p.out_features = weight.size() == 2 ? weight[0] : 1;
  p.has_bias = c.bias.has_value(), p.allow_tf32 = c.allow_tf32, p.deterministic = c.deterministic;
  sizes.pop_back();
  p.rows = checked_numel(entry, sizes, 1);
  if (weight.size() == 2) sizes.push_back(p.out_features);
  checked_numel(entry, sizes, 8);
  if (c.bias) {
    check_same(entry, c.input, *c.bias, "bias");
    const Sizes bias = sizes_of(*c.bias);
    check(bias.empty() || (weight.size() == 2 && bias.size() == 1 && (bias[0] == p.out_features || bias[0] == 1)), entry,
          "needs a bias of ", weight.size() == 2 ? "(out_features,)" : "()", " for weight ", to_string(weight), ", got ",
          to_string(bias));
    if (bias.empty() || bias[0] != p.out_features) c.bias = call_aten("aten::expand", "", *c.bias, Sizes{p.out_features}, false);
  }
  return p;
}

Tensor linear_run(const Entry& asked, LinearCall& c) {
  check_same(asked, c.input, c.weight, "weight");
  const bool packed = !c.weight_size.empty();
  Sizes sizes;
  LinearProblem p = linear_problem(asked, c, packed ? c.weight_size : sizes_of(c.weight), sizes);
  p.activation = c.activation, p.has_residual = c.residual.has_value();
  const Chosen<LinearProblem> chosen(asked, device_of(asked, c.input), p);
  const Traits<LinearProblem>& traits = chosen.algorithm->traits;
  check(traits.epilogue || (!p.has_residual && p.activation == Activation::none), asked, "fuses no residual and no activation");
  auto check_sizes = [&](const Tensor& t, const char* name) {
    check_same(asked, c.input, t, name);
    check(sizes_of(t) == sizes, asked, "needs ", name, " of sizes ", to_string(sizes), ", got ", to_string(sizes_of(t)));
  };
  if (c.residual) check_sizes(*c.residual, "residual");
  if (c.output) check_sizes(*c.output, "out");
  if (c.output) {
    check_apart(asked, *c.output, c.input, "input"), check_apart(asked, *c.output, c.weight, "the packed weight");
    if (c.bias) check_apart(asked, *c.output, *c.bias, "bias");
    if (c.residual) check_apart(asked, *c.output, *c.residual, "residual");
  }
  if (packed) check_pack(asked, c.weight, packed_tensor_bytes(traits, p), pack_tag(asked, pack_description(p)));

  const bool direct = c.output && is_contiguous(*c.output);
  Tensor output = direct ? *c.output : empty(sizes, c.input.scalar_type(), c.input);
  if (output.numel() == 0) return output;
  if (p.in_features == 0 && p.activation == Activation::none && !c.residual) {  // sums of nothing
    if (c.bias)
      torch::stable::copy_(output, *c.bias);
    else
      torch::stable::zero_(output);
  } else if (traits.tensors) {
    const DeviceGuard guard = on_device_of(c.input);
    traits.tensors(p, &c);
    return c.output.value();
  } else {
    const Tensor x = as_contiguous(c.input), w = packed ? c.weight : as_contiguous(c.weight),
                 b = c.bias ? as_contiguous(*c.bias) : w, r = c.residual ? as_contiguous(*c.residual) : x;
    run_kernel(chosen, p,
               {x.const_data_ptr(), w.const_data_ptr(), c.bias ? b.const_data_ptr() : nullptr,
                c.residual ? r.const_data_ptr() : nullptr, output.mutable_data_ptr()},
               x, packed && traits.packed_bytes);
  }
  if (c.output && !direct) torch::stable::copy_(*c.output, output);
  return output;
}

void forward(const Entry& entry, StableIValue* stack) {
  Arguments in(stack);
  LinearCall c;
  c.input = in.take<Tensor>(), c.weight = in.take<Tensor>(), c.bias = in.take<std::optional<Tensor>>(), c.take_options(in);
  give(stack, 0, linear_run(entry, c));
}

// x w as `by` computes it: linear's weight is w transposed.
Tensor product(const Entry& by, const LinearCall& options, const Tensor& x, const Tensor& w) {
  LinearCall c;
  c.input = x, c.weight = torch::stable::transpose(w, 0, 1), c.allow_tf32 = options.allow_tf32,
  c.deterministic = options.deterministic;
  return linear_run(by, c);
}

// dX = dY W and dW = dY^T X by the algorithms named, or by PyTorch's matmul where null; of matrices.
Gradients gradients(const Entry& asked, const LinearCall& c, const Tensor& grad, const std::vector<bool>& wanted,
                    const Entry* backward_input, const Entry* backward_weight) {
  check(wanted.size() == 3, asked, "needs 3 flags in output_mask, got ", wanted.size());
  check_same(asked, c.input, c.weight, "weight"), check_same(asked, c.input, grad, "grad_output");
  check(c.input.dim() == 2 && c.weight.dim() == 2 && grad.dim() == 2 && c.input.size(1) == c.weight.size(1) &&
            grad.size(0) == c.input.size(0) && grad.size(1) == c.weight.size(0),
        asked,
        "needs matrices grad_output (rows, out_features), input (rows, in_features), weight (out_features, in_features), got ",
        to_string(sizes_of(grad)), ", ", to_string(sizes_of(c.input)), ", ", to_string(sizes_of(c.weight)));
  auto nothing = [&] { return empty({0}, c.input.scalar_type(), c.input); };  // one each: results must not alias
  Gradients result{nothing(), nothing(), nothing()};
  const Tensor grad_t = torch::stable::transpose(grad, 0, 1);
  if (wanted[0]) result[0] = backward_input ? product(*backward_input, c, grad, c.weight) : torch::stable::matmul(grad, c.weight);
  if (wanted[1])
    result[1] = backward_weight ? product(*backward_weight, c, grad_t, c.input) : torch::stable::matmul(grad_t, c.input);
  if (wanted[2])
    result[2] = call_aten("aten::sum", "dim_IntList", grad, std::optional<Sizes>(Sizes{0}), false, std::optional<ScalarType>());
  return result;
}

// The algorithm of the gradients that `asked` computes itself, or null where PyTorch does.
const Entry* own_backward(const Entry& asked, LinearCall c) {
  Sizes sizes;
  LinearProblem p = linear_problem(asked, c, sizes_of(c.weight), sizes);
  p.deterministic = false;  // what runs is asked again, and PyTorch's gradients are none of the algorithm's affair
  const Chosen<LinearProblem> chosen(asked, device_of(asked, c.input), p);
  return chosen.algorithm->traits.backward == Backward::own ? chosen.entry : nullptr;
}
struct BackwardArguments {
  explicit BackwardArguments(Arguments& in) : grad(in.take<Tensor>()) {
    call.input = in.take<Tensor>(), call.weight = in.take<Tensor>();
    wanted = in.take<std::vector<bool>>();
  }
  Tensor grad;
  LinearCall call;
  std::vector<bool> wanted;
};
void backward(const Entry& entry, StableIValue* stack) {
  Arguments in(stack);
  BackwardArguments a(in);
  a.call.take_options(in);
  const Entry* own = own_backward(entry, a.call);
  give_gradients(stack, gradients(entry, a.call, a.grad, a.wanted, own, own));
}

void mixed(StableIValue* stack) {
  Arguments in(stack);
  LinearCall c;
  c.input = in.take<Tensor>(), c.weight = in.take<Tensor>(), c.bias = in.take<std::optional<Tensor>>();
  const std::string names[] = {in.take<std::string>(), in.take<std::string>(), in.take<std::string>()};
  c.take_options(in);
  give(stack, 0, linear_run(entry_named(operation(), names[0]), c));
}
void mixed_backward(StableIValue* stack) {
  Arguments in(stack);
  BackwardArguments a(in);
  const std::string names[] = {in.take<std::string>(), in.take<std::string>(), in.take<std::string>()};
  a.call.take_options(in);
  const Entry& asked = entry_named(operation(), names[0]);
  const Entry* own = names[1].empty() || names[2].empty() ? own_backward(asked, a.call) : nullptr;
  const Entry* by[2];
  for (int i : {0, 1}) by[i] = names[i + 1].empty() ? own : &entry_named(operation(), names[i + 1]);
  give_gradients(stack, gradients(asked, a.call, a.grad, a.wanted, by[0], by[1]));
}

void pack(const Entry& entry, StableIValue* stack) {
  const Tensor weight = Arguments(stack).take<Tensor>();
  check(weight.dim() == 2, entry, "needs a weight (out_features, in_features), got ", to_string(sizes_of(weight)));
  const int64_t sizes[] = {-1, weight.size(1), weight.size(0), 0};
  const LinearProblem p = problem_from({dtype_of(entry, weight), sizes, std::size(sizes)});
  const Chosen<LinearProblem> chosen(entry, device_of(entry, weight), p);
  give(stack, 0, pack_weight(chosen, p, weight, pack_description(p)));
}
LinearCall packed_call(const Entry& entry, Arguments& in) {
  LinearCall c;
  c.input = in.take<Tensor>(), c.weight = in.take<Tensor>(), c.weight_size = in.take<Sizes>();
  c.bias = in.take<std::optional<Tensor>>(), c.residual = in.take<std::optional<Tensor>>();
  const std::string activation = in.take<std::string>();
  c.take_options(in);
  check(c.weight_size.size() == 2, entry, "needs the 2 sizes of the weight, got ", to_string(c.weight_size));
  c.activation = activation_named(entry, activation);
  return c;
}
void packed(const Entry& entry, StableIValue* stack) {
  Arguments in(stack);
  LinearCall c = packed_call(entry, in);
  give(stack, 0, linear_run(entry, c));
}
void packed_out(const Entry& entry, StableIValue* stack) {
  Arguments in(stack);
  LinearCall c = packed_call(entry, in);
  c.output = in.take<Tensor>();
  linear_run(entry, c);
}

#define OPTIONS "bool allow_tf32=False, bool deterministic=False"
#define PACKED                                                                                                           \
  "(Tensor input, Tensor packed, int[] weight_size, Tensor? bias=None, Tensor? residual=None, str activation=\"none\", " \
  "*, " OPTIONS
#define GRADIENTS "(Tensor grad_output, Tensor input, Tensor weight, bool[3] output_mask, *, "
constexpr OperatorKind kinds[] = {
    {"linear_", "", "(Tensor input, Tensor weight, Tensor? bias=None, *, " OPTIONS ") -> Tensor", forward, nullptr},
    {"_linear_", "_backward", GRADIENTS OPTIONS ") -> (Tensor, Tensor, Tensor)", backward, nullptr},
    {"_linear_", "_pack", "(Tensor weight) -> Tensor", pack, has_packs<LinearProblem>},
    {"_linear_", "_packed", PACKED ") -> Tensor", packed, has_packs<LinearProblem>},
    {"_linear_", "_packed_out", PACKED ", Tensor(a!) out) -> ()", packed_out, has_packs<LinearProblem>},
};
// The algorithms of output and gradients by name; "" for a gradient: as ai3::_linear_<forward>_backward computes it.
#define NAMES "str forward, str backward_input=\"\", str backward_weight=\"\", "
constexpr SharedOperator shared[] = {
    {"_linear_mixed(Tensor input, Tensor weight, Tensor? bias=None, *, " NAMES OPTIONS ") -> Tensor", mixed},
    {"_linear_mixed_backward" GRADIENTS NAMES OPTIONS ") -> (Tensor, Tensor, Tensor)", mixed_backward},
};
AI3_OPERATION(linear, "rows in_features out_features has_bias", kinds, std::size(kinds), shared, std::size(shared),
              AI3_QUERIES(LinearProblem, problem_from))
const Operation& operation() { return linear_operation; }

}  // namespace
}  // namespace ai3::ops

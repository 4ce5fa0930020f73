// ai3::linear_<algorithm>: schema, checks, and the way from tensors to kernels.
#include "linear.h"

#include "program/step.h"

namespace ai3::ops {
namespace {

void set_threads(LinearProblem& p) {
  p.threads = p.rows >= 0 ? threads(checked_product({p.rows, p.in_features, p.out_features})) : threads();
}

}  // namespace

LinearProblem linear_from(const Query& q) {
  if (q.count != 5) throw std::runtime_error("ai3: a linear query needs 5 sizes");
  LinearProblem p{};
  p.dtype = q.dtype, p.exclude = q.exclude;
  p.rows = q.sizes[0], p.in_features = q.sizes[1], p.out_features = q.sizes[2], p.has_bias = q.sizes[3] != 0,
  p.deterministic = q.sizes[4] > 0;
  check_numel({p.rows, p.in_features}), check_numel({p.in_features, p.out_features}), check_numel({p.rows, p.out_features});
  set_threads(p);
  return with_dense_rows(p);
}

namespace {

// Checks the arguments as torch.nn.functional.linear does; `sizes` get the output's.
LinearProblem linear_problem(const Entry& entry, LinearCall& c, std::span<const int64_t> weight, Sizes& sizes) {
  sizes = sizes_of(c.input);
  check(!sizes.empty(), entry, "needs input of at least one dimension");
  check(weight.size() == 1 || weight.size() == 2, entry, "needs a weight (out_features, in_features) or (in_features,), got ",
        weight);
  const int64_t in_features = sizes.back();
  check(in_features == weight.back(), entry, "needs input of ", weight.back(), " features in its last dimension, got ", sizes);
  LinearProblem p{};
  p.dtype = dtype_of(entry, c.input);
  p.in_features = in_features, p.out_features = weight.size() == 2 ? weight[0] : 1;
  p.has_bias = c.bias.has_value(), p.allow_tf32 = c.allow_tf32, p.deterministic = c.deterministic, p.exclude = c.excluded();
  p.parameters = c.parameters.value_or(entry.defaults);
  sizes.pop_back();
  p.rows = checked_numel(entry, sizes, 1);
  if (weight.size() == 2) sizes.push_back(p.out_features);
  checked_numel(entry, sizes, 8);
  set_threads(p);
  if (c.bias) {
    check_same(entry, c.input, *c.bias, "bias");
    const std::span<const int64_t> bias = view_of_sizes(*c.bias);
    check(bias.empty() || (weight.size() == 2 && bias.size() == 1 && (bias[0] == p.out_features || bias[0] == 1)), entry,
          "needs a bias of ", weight.size() == 2 ? "(out_features,)" : "()", " for weight ", weight, ", got ", bias);
    if (bias.empty() || bias[0] != p.out_features) c.bias = call_aten("aten::expand", "", *c.bias, Sizes{p.out_features}, false);
  }
  return with_dense_rows(p);
}

// Whether t, whose last dimension holds rows of `features` (1 where there is no such dimension), is rows at one distance.
bool rows_apart(const Tensor& t, int64_t features, bool has_dimension, int64_t& apart) {
  int64_t d = t.dim() - 1;
  if (has_dimension && features > 1 && t.stride(d) != 1) return false;
  apart = features;
  int64_t rows = 1;  // of the dimensions seen
  for (d -= has_dimension; d >= 0; d--) {
    if (t.size(d) == 1) continue;
    if (rows == 1) apart = t.stride(d);
    if (t.stride(d) != rows * apart) return false;
    rows *= t.size(d);
  }
  return apart >= features;
}

Tensor linear_run(const Entry& asked, LinearCall& c) {
  check_weight(asked, c);
  const bool packed = !c.weight_size.empty();
  Sizes sizes;
  LinearProblem p = linear_problem(asked, c, packed ? c.weight_size : view_of_sizes(c.weight), sizes);
  p.activation = c.activation, p.has_residual = c.residual.has_value();
  const bool of_nothing = p.in_features == 0 && p.activation == Activation::none && !c.residual;
  const bool some = p.rows > 0 && p.out_features > 0;
  const Prepared<LinearProblem> call = prepare(asked, where_of(asked, c.input), p, some && !of_nothing);
  const Traits<LinearProblem>& traits = call.algorithm->traits;
  check_places(asked, c, sizes);
  const std::optional<Tensor> slope = slope_for(asked, c, p.out_features);
  if (packed) check_pack(asked, c.weight, call.pack_tensor, pack_tag(asked, pack_description(p)));

  const bool matrix = (packed ? c.weight_size.size() : static_cast<size_t>(c.weight.dim())) == 2;
  const bool direct =
      c.output && (is_contiguous(*c.output) || (traits.sliced && rows_apart(*c.output, p.out_features, matrix, p.y_row)));
  Tensor output = direct ? *c.output : empty(sizes, c.input.scalar_type(), c.input);
  if (!direct) p.y_row = p.out_features;
  if (!some) return output;
  if (of_nothing) {
    if (c.bias)
      torch::stable::copy_(output, *c.bias);
    else
      torch::stable::zero_(output);
  } else if (traits.tensors) {
    c.algorithm = &call.algorithm->info;
    convert_weight(call, c, pack_description(p));
    traits.tensors(p, &c);
    if (c.output) torch::stable::copy_(*c.output, *c.result);
    return *c.result;
  } else {
    const ReadyWeight weight = packed ? ReadyWeight{c.weight, call.packs_alone} : ready_weight(call, c, pack_description(p));
    const bool in_place = traits.sliced && rows_apart(c.input, p.in_features, true, p.x_row);
    if (!in_place) p.x_row = p.in_features;
    const Tensor x = in_place ? c.input : as_contiguous(c.input), &w = weight.tensor, b = c.bias ? as_contiguous(*c.bias) : w,
                 r = c.residual ? residual_for(*c.residual, output, !is_contiguous(output), as_contiguous) : x;
    run_kernel(call, p,
               {.input = x.const_data_ptr(),
                .weight = w.const_data_ptr(),
                .bias = c.bias ? b.const_data_ptr() : nullptr,
                .residual = c.residual ? r.const_data_ptr() : nullptr,
                .output = output.mutable_data_ptr(),
                .slope = slope ? slope->const_data_ptr() : nullptr},
               x, weight.packed, c.workspace);
  }
  if (c.output && !direct) torch::stable::copy_(*c.output, output);
  return output;
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
                    GradientEntries by) {
  check(wanted.size() == 3, asked, "needs 3 flags in output_mask, got ", wanted.size());
  check_same(asked, c.input, c.weight, "weight"), check_same(asked, c.input, grad, "grad_output");
  check(c.input.dim() == 2 && c.weight.dim() == 2 && grad.dim() == 2 && c.input.size(1) == c.weight.size(1) &&
            grad.size(0) == c.input.size(0) && grad.size(1) == c.weight.size(0),
        asked,
        "needs matrices grad_output (rows, out_features), input (rows, in_features), weight (out_features, in_features), got ",
        grad, ", ", c.input, ", ", c.weight);
  auto nothing = [&] { return empty({0}, c.input.scalar_type(), c.input); };  // one each: results must not alias
  Gradients result{nothing(), nothing(), nothing()};
  LinearCall forward = c;
  Sizes ignored;
  const LinearProblem p = linear_problem(asked, forward, sizes_of(c.weight), ignored);
  const Device device = device_of(asked, c.input);
  const Tensor grad_t = torch::stable::transpose(grad, 0, 1);
  const bool some = p.rows > 0 && p.in_features > 0;
  for (size_t i : {0u, 1u}) {
    if (!wanted[i]) continue;
    if (by[i] && some && has_backward(*by[i], device, p, i)) {
      const Chosen<LinearProblem> chosen(*by[i], device, p);
      const Tensor gy = as_contiguous(grad), x = as_contiguous(c.input), w = as_contiguous(c.weight);
      const bool bias = i && wanted[2];
      if (bias) result[2] = empty({p.out_features}, x.scalar_type(), x);
      result[i] = empty(sizes_of(i ? w : x), x.scalar_type(), x);
      run_backward(chosen, p, gy, x, w, i ? nullptr : &result[0], i ? &result[1] : nullptr, bias ? &result[2] : nullptr);
    } else if (i) {
      result[1] = by[1] ? product(*by[1], c, grad_t, c.input) : torch::stable::matmul(grad_t, c.input);
    } else {
      result[0] = by[0] ? product(*by[0], c, grad, c.weight) : torch::stable::matmul(grad, c.weight);
    }
  }
  if (wanted[2] && result[2].numel() == 0)
    result[2] = call_aten("aten::sum", "dim_IntList", grad, std::optional<Sizes>(Sizes{0}), false, std::optional<ScalarType>());
  return result;
}

struct LinearOperation {
  using Call = LinearCall;
  using Problem = LinearProblem;
  static constexpr size_t weight_rank = 2;

  static const Operation& operation();
  static Problem problem(const Entry& entry, Call& c) {
    Sizes sizes;
    return linear_problem(entry, c, sizes_of(c.weight), sizes);
  }
  static Problem problem_of_weight(const Entry& entry, Call& c) {
    check(c.weight.dim() == 2, entry, "needs a weight (out_features, in_features), got ", c.weight);
    const int64_t sizes[] = {-1, c.weight.size(1), c.weight.size(0), 0, 0};
    return linear_from({dtype_of(entry, c.weight), sizes, std::size(sizes)});
  }
  static auto description(const Problem& p) { return pack_description(p); }
  static constexpr auto run = linear_run;
  static constexpr auto gradients = ops::gradients;
};

// A line of a program: linear_<algorithm> %x weight=$0:64,32.
struct LinearStep final : program::Step {
  LinearProblem p;
  const Entry& entry;
  bool reads_slices;

  explicit LinearStep(program::Reader& r) : entry(*r.entry) {
    const Traits<LinearProblem>& traits = r.traits<LinearProblem>();
    r.needs_operands(1);
    const program::Value x = r.operand(0);
    const Sizes w = r.line.constant_sizes("weight", 2);
    r.line.check(x.sizes.back() == w[1] && w[0] > 0,
                 "needs rows of " + std::to_string(w[1]) + " features, got " + to_string(x.sizes));
    Sizes sizes = x.sizes;
    sizes.back() = w[0];
    p = LinearProblem{};
    p.dtype = x.dtype, p.rows = w[1] ? program::count_of(x.sizes) / w[1] : 0, p.in_features = w[1], p.out_features = w[0];
    p.has_bias = r.line.has("bias"), p.parameters = r.parameters();
    set_threads(p), p = with_dense_rows(p);
    r.epilogue(p, w[0]);
    r.weight(p);
    r.elements("bias", p.dtype, w[0]);
    reads_slices = traits.sliced, writes_slices = traits.sliced && !p.has_residual;
    r.rows_output(std::move(sizes), p.dtype);
  }
  void emit(program::Emitter& e) override {
    const Sizes order = e.of(e.value).order;
    const int x = e.rows(e.operand(0), order, reads_slices);
    const int residual = p.has_residual ? e.rows(e.line().value("residual"), order, false) : -1;
    p.x_row = e.row(x, order), p.y_row = e.row(e.value, order);
    e.step(entry, p,
           {.input = e.at(x),
            .weight = e.constant("weight"),
            .bias = e.constant("bias"),
            .residual = e.at(residual),
            .output = e.output(),
            .slope = e.constant("slope")});
  }
};
AI3_STEPS(linear, LinearStep)

AI3_WEIGHTED_OPERATORS("linear", LinearOperation, "", "", "")
AI3_OPERATION(linear, "rows in_features out_features has_bias deterministic", kinds, std::size(kinds), shared, std::size(shared),
              AI3_QUERIES(LinearProblem, linear_from))
const Operation& LinearOperation::operation() { return linear_operation; }

}  // namespace
}  // namespace ai3::ops

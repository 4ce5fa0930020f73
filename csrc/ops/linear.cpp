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

}  // namespace

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
  Sizes sizes;
  const LinearProblem p = linear_problem(asked, c, sizes_of(c.weight), sizes);
  const Chosen<LinearProblem> chosen(asked, device_of(asked, c.input), p);
  Tensor output = empty(sizes, c.input.scalar_type(), c.input);
  if (output.numel() == 0) return output;
  if (p.in_features == 0) {  // sums of nothing
    if (c.bias) return torch::stable::copy_(output, *c.bias);
    return torch::stable::zero_(output);
  }
  if (chosen.algorithm->traits.tensors) {
    chosen.algorithm->traits.tensors(p, &c);
    return c.output.value();
  }
  const Tensor x = as_contiguous(c.input), w = as_contiguous(c.weight), b = c.bias ? as_contiguous(*c.bias) : w;
  run_kernel(chosen, p,
             {x.const_data_ptr(), w.const_data_ptr(), c.bias ? b.const_data_ptr() : nullptr, nullptr, output.mutable_data_ptr()},
             x);
  return output;
}

namespace {

void forward(const Entry& entry, StableIValue* stack) {
  Arguments in(stack);
  LinearCall c(in);
  give(stack, 0, linear_run(entry, c));
}

constexpr OperatorKind kinds[] = {
    {"linear_", "",
     "(Tensor input, Tensor weight, Tensor? bias=None, *, bool allow_tf32=False, bool deterministic=False) -> Tensor", forward,
     nullptr},
};
AI3_OPERATION(linear, "rows in_features out_features has_bias", kinds, std::size(kinds), nullptr, 0,
              AI3_QUERIES(LinearProblem, problem_from))

}  // namespace
}  // namespace ai3::ops

// ai3::group_norm_<algorithm>: schema, checks, and the way from tensors to kernels.
#include "../algos/group_norm/problem.h"
#include "normalization.h"

namespace ai3::ops {
namespace {

struct Call {
  Tensor input;
  int64_t groups = 0;
  std::optional<Tensor> weight, bias;
  double eps = 0;
  std::optional<Parameters> parameters = std::nullopt;  // of the algorithm's own
};

GroupNormProblem problem_from(const Query& q) {
  if (q.count != 8) throw std::runtime_error("ai3: a group_norm query needs 8 sizes");
  const int64_t* const s = q.sizes;
  check_numel({s[0], s[1], s[2]});
  GroupNormProblem p{};
  p.dtype = q.dtype, p.of = {s[0], s[1], s[2], s[7] != 0}, p.groups = s[3];
  p.has_weight = s[4] != 0, p.has_bias = s[5] != 0, p.wide_weight = s[6] > 0, p.threads = threads_of(p.of);
  return p;
}

// Checks the arguments as torch.group_norm does.
GroupNormProblem problem(const Entry& entry, const Call& c) {
  GroupNormProblem p{};
  p.dtype = dtype_of(entry, c.input), p.of = channels_of(entry, c.input), p.groups = c.groups;
  check(c.groups > 0 && p.of.channels % c.groups == 0, entry, "needs num_groups that divide ", p.of.channels, " channels, got ",
        c.groups);
  const bool wide = is_wide(c.input, {&c.weight, &c.bias});
  check_weight(entry, c.input, c.weight, {p.of.channels}, "weight", wide);
  check_weight(entry, c.input, c.bias, {p.of.channels}, "bias", wide);
  p.eps = c.eps, p.has_weight = c.weight.has_value(), p.has_bias = c.bias.has_value(), p.wide_weight = wide;
  p.parameters = c.parameters.value_or(entry.defaults), p.threads = threads_of(p.of);
  return p;
}

// y, which lies as the problem says.
void run(const Entry& entry, const Call& c, Tensor& y, const std::optional<Tensor>& workspace = std::nullopt) {
  const GroupNormProblem p = problem(entry, c);
  const Prepared<GroupNormProblem> call = prepare(entry, where_of(entry, c.input), p, y.numel() > 0);
  if (y.numel() == 0) return;
  const Tensor x = laid_as(c.input, p.of), w = c.weight ? as_contiguous(*c.weight) : x, b = c.bias ? as_contiguous(*c.bias) : x;
  run_kernel(call, p,
             {.input = x.const_data_ptr(),
              .weight = c.weight ? w.const_data_ptr() : nullptr,
              .bias = c.bias ? b.const_data_ptr() : nullptr,
              .output = y.mutable_data_ptr()},
             x, false, workspace);
}
Tensor empty_output(const Entry& entry, const Call& c) {
  dtype_of(entry, c.input);
  return empty(sizes_of(c.input), c.input.scalar_type(), c.input, suggests_channels_last(c.input));
}

template <bool inference>
void forward(const Entry& entry, StableIValue* stack) {
  Arguments in(stack, inference);
  Call c;
  c.input = in.take<Tensor>();
  if (!inference) c.groups = in.take<int64_t>();
  c.weight = in.take<std::optional<Tensor>>(), c.bias = in.take<std::optional<Tensor>>();
  if (inference) c.groups = in.take<int64_t>();
  c.eps = in.take<double>(), c.parameters = in.take_parameters(entry);
  if (inference) check_inference(entry);
  Tensor output = empty_output(entry, c);
  run(entry, c, output);
  give(stack, 0, output);
}
void forward_out(const Entry& entry, StableIValue* stack) {
  Arguments in(stack);
  Call c;
  c.input = in.take<Tensor>(), c.groups = in.take<int64_t>();
  c.weight = in.take<std::optional<Tensor>>(), c.bias = in.take<std::optional<Tensor>>(), c.eps = in.take<double>();
  Tensor out = in.take<Tensor>();
  const auto workspace = in.take<std::optional<Tensor>>();
  c.parameters = in.take_parameters(entry);
  mark_written(entry, out);
  dtype_of(entry, c.input), check_place(entry, c.input, out, sizes_of(c.input), "out");
  check_apart(entry, out, c.input, "input");
  if (c.weight) check_apart(entry, out, *c.weight, "weight");
  if (c.bias) check_apart(entry, out, *c.bias, "bias");
  check_workspace(
      entry, workspace,
      {{&c.input, "input"}, {&out, "out"}, {c.weight ? &*c.weight : nullptr, "weight"}, {c.bias ? &*c.bias : nullptr, "bias"}});
  const bool last = suggests_channels_last(c.input);
  if (last ? is_dense(out, true) : is_contiguous(out)) return run(entry, c, out, workspace);
  Tensor output = empty_output(entry, c);
  run(entry, c, output, workspace);
  torch::stable::copy_(out, output);
}

void backward(const Entry& entry, StableIValue* stack) {
  Arguments in(stack);
  const Tensor grad = in.take<Tensor>();
  Call c;
  c.input = in.take<Tensor>(), c.groups = in.take<int64_t>(), c.weight = in.take<std::optional<Tensor>>();
  c.eps = in.take<double>();
  const auto wanted = in.take<std::vector<bool>>();
  c.parameters = in.take_parameters(entry);
  check(wanted.size() == 3, entry, "needs 3 flags in output_mask, got ", wanted.size());
  check_same(entry, c.input, grad, "grad_output");
  GroupNormProblem p = problem(entry, c);
  // The dtype of an absent weight's bias is not known here: float32 loses nothing, and autograd casts to a bias of 16 bits.
  if (!c.weight && size_of(p.dtype) == 2) p.wide_weight = true;
  check(sizes_of(grad) == sizes_of(c.input), entry, "needs grad_output of the input's sizes ", sizes_of(c.input), ", got ", grad);
  const Device device = device_of(entry, c.input);
  Chosen<GroupNormProblem> chosen(entry, device, p);
  if (!chosen.algorithm->traits.backward) chosen = Chosen<GroupNormProblem>(entry_named(*entry.operation, "direct"), device, p);
  const ScalarType of_weight = p.wide_weight ? ScalarType::Float : c.input.scalar_type();
  const bool last = suggests_channels_last(c.input);
  const Sizes channels{p.of.channels};
  Gradients result{
      wanted[0] ? empty(sizes_of(c.input), c.input.scalar_type(), c.input, last) : empty({0}, c.input.scalar_type(), c.input),
      empty(wanted[1] ? channels : Sizes{0}, of_weight, c.input), empty(wanted[2] ? channels : Sizes{0}, of_weight, c.input)};
  if (c.input.numel() > 0) {
    const Tensor x = laid_as(c.input, p.of), gy = grad.dim() == 4 ? dense(grad, last) : as_contiguous(grad),
                 w = c.weight ? as_contiguous(*c.weight) : x;
    auto written = [&](size_t i) { return wanted[i] ? result[i].mutable_data_ptr() : nullptr; };
    run_backward(
        chosen, p,
        {gy.const_data_ptr(), x.const_data_ptr(), c.weight ? w.const_data_ptr() : nullptr, written(0), written(1), written(2)},
        x);
  } else {
    for (Tensor& t : result) torch::stable::zero_(t);
  }
  give_gradients(stack, result);
}

// A line of a program: group_norm_<algorithm> %x groups=32 eps=1e-05 weight=$0 bias=$1.
struct GroupNormStep final : program::Step {
  GroupNormProblem p{};
  const Entry& entry;

  explicit GroupNormStep(program::Reader& r) : entry(*r.entry) {
    r.traits<GroupNormProblem>();
    r.needs_operands(1);
    const program::Value x = r.operand(0);
    p.dtype = x.dtype, p.of = channels_value(r, x), p.groups = r.line.number_of("groups"), p.eps = r.line.real("eps");
    r.line.check(p.groups > 0 && p.of.channels % p.groups == 0,
                 "needs groups that divide the channels, got " + to_string(x.sizes));
    p.has_weight = r.line.has("weight"), p.has_bias = r.line.has("bias"), p.parameters = r.parameters();
    p.threads = threads_of(p.of);
    r.elements("weight", p.dtype, p.of.channels), r.elements("bias", p.dtype, p.of.channels);
  }
  void emit(program::Emitter& e) override {
    const int x = e.rows(e.operand(0), e.of(e.value).order, false);
    e.step(entry, p, {.input = e.at(x), .weight = e.constant("weight"), .bias = e.constant("bias"), .output = e.output()});
  }
};
AI3_STEPS(group_norm, GroupNormStep)

// A user's algorithm, which has no kernel for gradients, gets PyTorch's.
bool has_gradients(const AlgorithmInfo& info) {
  const auto& traits = reinterpret_cast<const Algorithm<GroupNormProblem>&>(info).traits;
  return traits.backward || traits.choose;
}

constexpr OperatorKind kinds[] = {
    {"group_norm_", "", "(Tensor input, int num_groups, Tensor? weight=None, Tensor? bias=None, float eps=1e-05) -> Tensor",
     forward<false>, nullptr},
    {"_group_norm_", "_backward",
     "(Tensor grad_output, Tensor input, int num_groups, Tensor? weight, float eps, bool[3] output_mask) -> (Tensor, Tensor, "
     "Tensor)",
     backward, has_gradients},
    {"_group_norm_", "_out",
     "(Tensor input, int num_groups, Tensor? weight=None, Tensor? bias=None, float eps=1e-05, *, Tensor(a!) out, Tensor(b!)? "
     "workspace=None) -> ()",
     forward_out, nullptr},
    {"_group_norm_", "_infer", "(Tensor input, Tensor? weight, Tensor? bias, int numbers) -> Tensor", forward<true>,
     is_method<GroupNormProblem>},
};
AI3_OPERATION(group_norm, "batch channels pixels groups has_weight has_bias wide_weight channels_last", kinds, std::size(kinds),
              nullptr, 0, AI3_QUERIES(GroupNormProblem, problem_from))

}  // namespace
}  // namespace ai3::ops

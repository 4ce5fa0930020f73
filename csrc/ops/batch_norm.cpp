// ai3::batch_norm_<algorithm>: schema, checks, and the way from tensors to kernels.
#include "../algos/batch_norm/problem.h"
#include "normalization.h"

namespace ai3::ops {
namespace {

struct Call {
  Tensor input;
  std::optional<Tensor> mean, variance, weight, bias;
  bool training = false;
  double momentum = 0, eps = 0;
  std::optional<Parameters> parameters = std::nullopt;  // of the algorithm's own
};

BatchNormProblem problem_from(const Query& q) {
  if (q.count != 8) throw std::runtime_error("ai3: a batch_norm query needs 8 sizes");
  const int64_t* const s = q.sizes;
  check_numel({s[0], s[1], s[2]});
  BatchNormProblem p{};
  p.dtype = q.dtype, p.of = {s[0], s[1], s[2], s[7] != 0}, p.training = s[3] != 0;
  p.has_weight = s[4] != 0, p.has_bias = s[5] != 0, p.wide_weight = s[6] > 0, p.threads = threads_of(p.of);
  return p;
}

// Checks the arguments as torch.nn.functional.batch_norm does.
BatchNormProblem problem(const Entry& entry, const Call& c) {
  BatchNormProblem p{};
  p.dtype = dtype_of(entry, c.input), p.of = channels_of(entry, c.input);
  check(c.training || (c.mean && c.variance), entry, "needs running_mean and running_var where training is False, got ",
        c.mean       ? "no running_var"
        : c.variance ? "no running_mean"
                     : "neither");
  const bool wide = is_wide(c.input, {&c.weight, &c.bias, &c.mean, &c.variance});
  const std::pair<const std::optional<Tensor>*, const char*> all[] = {
      {&c.weight, "weight"}, {&c.bias, "bias"}, {&c.mean, "running_mean"}, {&c.variance, "running_var"}};
  for (const auto& [t, name] : all) check_weight(entry, c.input, *t, {p.of.channels}, name, wide);
  p.eps = c.eps, p.training = c.training, p.has_weight = c.weight.has_value(), p.has_bias = c.bias.has_value();
  p.wide_weight = wide, p.parameters = c.parameters.value_or(entry.defaults), p.threads = threads_of(p.of);
  return p;
}
// Numbers of the channels, contiguous; `otherwise` stands for those that are not there.
Tensor numbers(const std::optional<Tensor>& t, const Tensor& otherwise) { return t ? as_contiguous(*t) : otherwise; }

// y, which lies as the problem says.
void run(const Entry& entry, const Call& c, Tensor& y, const std::optional<Tensor>& workspace = std::nullopt) {
  const BatchNormProblem p = problem(entry, c);
  const Prepared<BatchNormProblem> call = prepare(entry, where_of(entry, c.input), p, y.numel() > 0);
  if (y.numel() == 0) return;
  const Tensor x = laid_as(c.input, p.of), w = numbers(c.weight, x), b = numbers(c.bias, x), mean = numbers(c.mean, x),
               variance = numbers(c.variance, x);
  run_kernel(call, p,
             {.input = x.const_data_ptr(),
              .weight = c.weight ? w.const_data_ptr() : nullptr,
              .bias = c.bias ? b.const_data_ptr() : nullptr,
              .mean = mean.const_data_ptr(),
              .variance = variance.const_data_ptr(),
              .output = y.mutable_data_ptr()},
             x, false, workspace);
}
Tensor empty_output(const Entry& entry, const Call& c) {
  dtype_of(entry, c.input);
  return empty(sizes_of(c.input), c.input.scalar_type(), c.input, suggests_channels_last(c.input));
}

Call take_call(Arguments& in) {
  Call c;
  c.input = in.take<Tensor>(), c.mean = in.take<std::optional<Tensor>>(), c.variance = in.take<std::optional<Tensor>>();
  c.weight = in.take<std::optional<Tensor>>(), c.bias = in.take<std::optional<Tensor>>();
  c.training = in.take<bool>(), c.momentum = in.take<double>(), c.eps = in.take<double>();
  return c;
}
template <bool inference>
void forward(const Entry& entry, StableIValue* stack) {
  Arguments in(stack, inference);
  Call c = take_call(in);
  c.parameters = in.take_parameters(entry);
  if (inference) check_inference(entry);
  Tensor output = empty_output(entry, c);
  run(entry, c, output);
  give(stack, 0, output);
}
void forward_out(const Entry& entry, StableIValue* stack) {
  Arguments in(stack);
  Call c = take_call(in);
  Tensor out = in.take<Tensor>();
  const auto workspace = in.take<std::optional<Tensor>>();
  c.parameters = in.take_parameters(entry);
  mark_written(entry, out);
  dtype_of(entry, c.input), check_place(entry, c.input, out, sizes_of(c.input), "out");
  check_apart(entry, out, c.input, "input");
  const std::pair<const std::optional<Tensor>*, const char*> all[] = {
      {&c.weight, "weight"}, {&c.bias, "bias"}, {&c.mean, "running_mean"}, {&c.variance, "running_var"}};
  for (const auto& [t, name] : all)
    if (*t) check_apart(entry, out, **t, name);
  auto given = [](const std::optional<Tensor>& t) { return t ? &*t : nullptr; };
  check_workspace(entry, workspace,
                  {{&c.input, "input"},
                   {&out, "out"},
                   {given(c.weight), "weight"},
                   {given(c.bias), "bias"},
                   {given(c.mean), "running_mean"},
                   {given(c.variance), "running_var"}});
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
  c.input = in.take<Tensor>(), c.mean = in.take<Tensor>(), c.variance = in.take<Tensor>();
  c.weight = in.take<std::optional<Tensor>>(), c.eps = in.take<double>();
  const auto wanted = in.take<std::vector<bool>>();
  c.parameters = in.take_parameters(entry);
  check(wanted.size() == 3, entry, "needs 3 flags in output_mask, got ", wanted.size());
  check_same(entry, c.input, grad, "grad_output");
  BatchNormProblem p = problem(entry, c);
  check(sizes_of(grad) == sizes_of(c.input), entry, "needs grad_output of the input's sizes ", sizes_of(c.input), ", got ", grad);
  const Device device = device_of(entry, c.input);
  Chosen<BatchNormProblem> chosen(entry, device, p);
  if (!chosen.algorithm->traits.backward) chosen = Chosen<BatchNormProblem>(entry_named(*entry.operation, "direct"), device, p);
  const ScalarType type = c.input.scalar_type(), of_weight = p.wide_weight ? ScalarType::Float : type;
  const bool last = suggests_channels_last(c.input);
  const Sizes channels{p.of.channels};
  Gradients result{wanted[0] ? empty(sizes_of(c.input), type, c.input, last) : empty({0}, type, c.input),
                   empty(wanted[1] ? channels : Sizes{0}, of_weight, c.input),
                   empty(wanted[2] ? channels : Sizes{0}, of_weight, c.input)};
  if (c.input.numel() > 0) {
    const Tensor x = laid_as(c.input, p.of), gy = grad.dim() == 4 ? dense(grad, last) : as_contiguous(grad),
                 w = numbers(c.weight, x), mean = numbers(c.mean, x), variance = numbers(c.variance, x);
    auto written = [&](size_t i) { return wanted[i] ? result[i].mutable_data_ptr() : nullptr; };
    run_backward(chosen, p,
                 {.grad_output = gy.const_data_ptr(),
                  .input = x.const_data_ptr(),
                  .weight = c.weight ? w.const_data_ptr() : nullptr,
                  .mean = mean.const_data_ptr(),
                  .variance = variance.const_data_ptr(),
                  .grad_input = written(0),
                  .grad_weight = written(1),
                  .grad_bias = written(2)},
                 x);
  } else {
    for (Tensor& t : result) torch::stable::zero_(t);
  }
  give_gradients(stack, result);
}

// A line of a program: batch_norm_<algorithm> %x eps=1e-05 running_mean=$0 running_var=$1 weight=$2 bias=$3.
struct BatchNormStep final : program::Step {
  BatchNormProblem p{};
  const Entry& entry;

  explicit BatchNormStep(program::Reader& r) : entry(*r.entry) {
    r.traits<BatchNormProblem>();
    r.needs_operands(1);
    const program::Value x = r.operand(0);
    p.dtype = x.dtype, p.of = channels_value(r, x), p.eps = r.line.real("eps");
    r.line.check(r.line.has("running_mean") && r.line.has("running_var"), "needs running_mean and running_var");
    p.has_weight = r.line.has("weight"), p.has_bias = r.line.has("bias"), p.parameters = r.parameters();
    p.threads = threads_of(p.of);
    for (const char* name : {"running_mean", "running_var", "weight", "bias"}) r.elements(name, p.dtype, p.of.channels);
  }
  void emit(program::Emitter& e) override {
    const int x = e.rows(e.operand(0), e.of(e.value).order, false);
    e.step(entry, p,
           {.input = e.at(x),
            .weight = e.constant("weight"),
            .bias = e.constant("bias"),
            .mean = e.constant("running_mean"),
            .variance = e.constant("running_var"),
            .output = e.output()});
  }
};
AI3_STEPS(batch_norm, BatchNormStep)

// A user's algorithm, which has no kernel for gradients, gets PyTorch's.
bool has_gradients(const AlgorithmInfo& info) {
  const auto& traits = reinterpret_cast<const Algorithm<BatchNormProblem>&>(info).traits;
  return traits.backward || traits.choose;
}

#define AI3_BATCH_NORM_ARGUMENTS                                                                                            \
  "(Tensor input, Tensor? running_mean, Tensor? running_var, Tensor? weight=None, Tensor? bias=None, bool training=False, " \
  "float momentum=0.1, float eps=1e-05"
constexpr OperatorKind kinds[] = {
    {"batch_norm_", "", AI3_BATCH_NORM_ARGUMENTS ") -> Tensor", forward<false>, nullptr},
    {"_batch_norm_", "_backward",
     "(Tensor grad_output, Tensor input, Tensor running_mean, Tensor running_var, Tensor? weight, float eps, bool[3] "
     "output_mask) "
     "-> (Tensor, Tensor, Tensor)",
     backward, has_gradients},
    {"_batch_norm_", "_out", AI3_BATCH_NORM_ARGUMENTS ", *, Tensor(a!) out, Tensor(b!)? workspace=None) -> ()", forward_out,
     nullptr},
    {"_batch_norm_", "_infer",
     "(Tensor input, Tensor? running_mean, Tensor? running_var, Tensor? weight, Tensor? bias, int numbers) -> Tensor",
     forward<true>, is_method<BatchNormProblem>},
};
AI3_OPERATION(batch_norm, "batch channels pixels training has_weight has_bias wide_weight channels_last", kinds, std::size(kinds),
              nullptr, 0, AI3_QUERIES(BatchNormProblem, problem_from))

}  // namespace
}  // namespace ai3::ops

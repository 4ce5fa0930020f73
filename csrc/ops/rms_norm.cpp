// ai3::rms_norm_<algorithm>: schema, checks, and the way from tensors to kernels.
#include "../algos/rms_norm/problem.h"
#include "normalization.h"

namespace ai3::ops {
namespace {

struct Call {
  Tensor input;
  Sizes shape;
  std::optional<Tensor> weight;
  double eps = 0;
  std::optional<Parameters> parameters = std::nullopt;  // of the algorithm's own
};

// An element takes as long as some multiplications of a product do.
void set_threads(RmsNormProblem& p) { p.threads = p.rows < 0 ? threads() : threads(checked_product({p.rows, p.features, 8})); }

RmsNormProblem problem_from(const Query& q) {
  if (q.count != 4) throw std::runtime_error("ai3: an rms_norm query needs 4 sizes");
  check_numel({q.sizes[0], q.sizes[1]});
  RmsNormProblem p{};
  p.dtype = q.dtype, p.rows = q.sizes[0], p.features = q.sizes[1];
  p.has_weight = q.sizes[2] != 0, p.wide_weight = q.sizes[3] > 0;
  set_threads(p);
  return p;
}

// Checks the arguments as torch.nn.functional.rms_norm does.
RmsNormProblem problem(const Entry& entry, const Call& c) {
  const DType dtype = dtype_of(entry, c.input);
  const Sizes input = sizes_of(c.input);
  const bool wide = is_wide(c.input, {&c.weight});
  check_rows(entry, input, c.shape);
  check_weight(entry, c.input, c.weight, c.shape, "weight", wide);
  RmsNormProblem p{};
  p.dtype = dtype, p.features = checked_numel(entry, c.shape, 1), p.rows = rows_of(entry, input, c.shape);
  p.eps = c.eps, p.has_weight = c.weight.has_value(), p.wide_weight = wide;
  p.parameters = c.parameters.value_or(entry.defaults);
  set_threads(p);
  return p;
}

// What ATen adds where no eps is given: of the type that it computes in.
double eps_of(const Tensor& input, std::optional<double> eps) {
  const bool wide = input.scalar_type() == ScalarType::Double;
  return eps.value_or(wide ? std::numeric_limits<double>::epsilon() : std::numeric_limits<float>::epsilon());
}

// y, contiguous.
void run(const Entry& entry, const Call& c, Tensor& y, const std::optional<Tensor>& workspace = std::nullopt) {
  const RmsNormProblem p = problem(entry, c);
  const Prepared<RmsNormProblem> call = prepare(entry, where_of(entry, c.input), p, y.numel() > 0);
  if (y.numel() == 0) return;
  const Tensor x = as_contiguous(c.input), w = c.weight ? as_contiguous(*c.weight) : x;
  run_kernel(call, p,
             {.input = x.const_data_ptr(), .weight = c.weight ? w.const_data_ptr() : nullptr, .output = y.mutable_data_ptr()}, x,
             false, workspace);
}
Tensor empty_output(const Entry& entry, const Call& c) {
  dtype_of(entry, c.input);
  return empty(sizes_of(c.input), c.input.scalar_type(), c.input);
}

template <bool inference>
void forward(const Entry& entry, StableIValue* stack) {
  Arguments in(stack, inference);
  Call c;
  c.input = in.take<Tensor>();
  if (!inference) c.shape = in.take_list();
  c.weight = in.take<std::optional<Tensor>>();
  if (inference) c.shape = in.take_list();
  c.eps = inference ? in.take<double>() : eps_of(c.input, in.take<std::optional<double>>());
  c.parameters = in.take_parameters(entry);
  if (inference) check_inference(entry);
  Tensor output = empty_output(entry, c);
  run(entry, c, output);
  give(stack, 0, output);
}
void forward_out(const Entry& entry, StableIValue* stack) {
  Arguments in(stack);
  Call c;
  c.input = in.take<Tensor>(), c.shape = in.take_list(), c.weight = in.take<std::optional<Tensor>>();
  c.eps = eps_of(c.input, in.take<std::optional<double>>());
  Tensor out = in.take<Tensor>();
  const auto workspace = in.take<std::optional<Tensor>>();
  c.parameters = in.take_parameters(entry);
  mark_written(entry, out);
  dtype_of(entry, c.input), check_place(entry, c.input, out, sizes_of(c.input), "out");
  check_apart(entry, out, c.input, "input");
  if (c.weight) check_apart(entry, out, *c.weight, "weight");
  check_workspace(entry, workspace, {{&c.input, "input"}, {&out, "out"}, {c.weight ? &*c.weight : nullptr, "weight"}});
  if (is_contiguous(out)) return run(entry, c, out, workspace);
  Tensor output = empty_output(entry, c);
  run(entry, c, output, workspace);
  torch::stable::copy_(out, output);
}

void backward(const Entry& entry, StableIValue* stack) {
  Arguments in(stack);
  const Tensor grad = in.take<Tensor>();
  Call c;
  c.input = in.take<Tensor>(), c.shape = in.take_list(), c.weight = in.take<std::optional<Tensor>>(), c.eps = in.take<double>();
  const auto wanted = in.take<std::vector<bool>>();
  c.parameters = in.take_parameters(entry);
  check(wanted.size() == 2, entry, "needs 2 flags in output_mask, got ", wanted.size());
  check_same(entry, c.input, grad, "grad_output");
  const RmsNormProblem p = problem(entry, c);
  check(sizes_of(grad) == sizes_of(c.input), entry, "needs grad_output of the input's sizes ", sizes_of(c.input), ", got ", grad);
  const Device device = device_of(entry, c.input);
  Chosen<RmsNormProblem> chosen(entry, device, p);
  if (!chosen.algorithm->traits.backward) chosen = Chosen<RmsNormProblem>(entry_named(*entry.operation, "direct"), device, p);
  const ScalarType of_weight = p.wide_weight ? ScalarType::Float : c.input.scalar_type();
  Tensor result[] = {empty(wanted[0] ? sizes_of(c.input) : Sizes{0}, c.input.scalar_type(), c.input),
                     empty(wanted[1] ? c.shape : Sizes{0}, of_weight, c.input)};
  if (c.input.numel() > 0) {
    const Tensor gy = as_contiguous(grad), x = as_contiguous(c.input), w = c.weight ? as_contiguous(*c.weight) : x;
    auto written = [&](size_t i) { return wanted[i] ? result[i].mutable_data_ptr() : nullptr; };
    run_backward(
        chosen, p,
        {gy.const_data_ptr(), x.const_data_ptr(), c.weight ? w.const_data_ptr() : nullptr, written(0), written(1), nullptr}, x);
  } else {
    for (Tensor& t : result) torch::stable::zero_(t);
  }
  give(stack, 0, result[0]), give(stack, 1, result[1]);
}

// A line of a program: rms_norm_<algorithm> %x dims=1 eps=1e-06 weight=$0; over the last `dims` dimensions.
struct RmsNormStep final : program::Step {
  RmsNormProblem p{};
  const Entry& entry;

  explicit RmsNormStep(program::Reader& r) : entry(*r.entry) {
    r.traits<RmsNormProblem>();
    r.needs_operands(1);
    const program::Value x = r.operand(0);
    std::tie(p.rows, p.features) = rows_value(r, x);
    p.dtype = x.dtype, p.eps = r.line.real("eps"), p.has_weight = r.line.has("weight"), p.parameters = r.parameters();
    set_threads(p);
    r.elements("weight", p.dtype, p.features);
    r.rows_output(x.sizes, x.dtype);
  }
  void emit(program::Emitter& e) override {
    const int x = e.rows(e.operand(0), e.of(e.value).order, false);
    e.step(entry, p, {.input = e.at(x), .weight = e.constant("weight"), .output = e.output()});
  }
};
AI3_STEPS(rms_norm, RmsNormStep)

// A user's algorithm, which has no kernel for gradients, gets PyTorch's.
bool has_gradients(const AlgorithmInfo& info) {
  const auto& traits = reinterpret_cast<const Algorithm<RmsNormProblem>&>(info).traits;
  return traits.backward || traits.choose;
}

constexpr OperatorKind kinds[] = {
    {"rms_norm_", "", "(Tensor input, int[] normalized_shape, Tensor? weight=None, float? eps=None) -> Tensor", forward<false>,
     nullptr},
    {"_rms_norm_", "_backward",
     "(Tensor grad_output, Tensor input, int[] normalized_shape, Tensor? weight, float eps, bool[2] output_mask) -> (Tensor, "
     "Tensor)",
     backward, has_gradients},
    {"_rms_norm_", "_out",
     "(Tensor input, int[] normalized_shape, Tensor? weight=None, float? eps=None, *, Tensor(a!) out, Tensor(b!)? "
     "workspace=None) "
     "-> ()",
     forward_out, nullptr},
    {"_rms_norm_", "_infer", "(Tensor input, Tensor? weight, int numbers) -> Tensor", forward<true>, is_method<RmsNormProblem>},
};
AI3_OPERATION(rms_norm, "rows features has_weight wide_weight", kinds, std::size(kinds), nullptr, 0,
              AI3_QUERIES(RmsNormProblem, problem_from))

}  // namespace
}  // namespace ai3::ops

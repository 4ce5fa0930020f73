// ai3::softmax_<algorithm>: schema, checks, and the way from tensors to kernels.
#include "../algos/softmax/problem.h"
#include "prepare/run.h"
#include "program/step.h"

namespace ai3::ops {
namespace {

struct Call {
  Tensor input;
  int64_t dim = 0;
  Parameters parameters = {};  // of the algorithm's own
};

// An element takes as long as some multiplications of a product do.
void set_threads(SoftmaxProblem& p) {
  p.threads = sizes_known(p) ? threads(checked_product({p.outer, p.size, p.inner, 8})) : threads();
}
void set_sizes(SoftmaxProblem& p, const Sizes& sizes, int64_t dim) {
  const auto at = sizes.begin() + static_cast<std::ptrdiff_t>(dim);
  auto product = [](auto begin, auto end) {
    int64_t n = 1;
    for (; begin != end; ++begin) n = checked_mul(n, *begin);
    return n;
  };
  p.outer = product(sizes.begin(), at), p.size = sizes.empty() ? 1 : *at;
  p.inner = sizes.empty() ? 1 : product(at + 1, sizes.end());
  set_threads(p);
}

SoftmaxProblem problem_from(const Query& q) {
  if (q.count != 3) throw std::runtime_error("ai3: a softmax query needs 3 sizes");
  check_numel({q.sizes[0], q.sizes[1], q.sizes[2]});
  SoftmaxProblem p{};
  p.dtype = q.dtype, p.outer = q.sizes[0], p.size = q.sizes[1], p.inner = q.sizes[2];
  set_threads(p);
  return p;
}

// Checks the arguments as torch.softmax does.
SoftmaxProblem problem(const Entry& entry, const Call& c) {
  SoftmaxProblem p{};
  p.dtype = dtype_of(entry, c.input);
  const int64_t rank = std::max<int64_t>(c.input.dim(), 1);
  check(c.dim >= -rank && c.dim < rank, entry, "needs dim in [", -rank, ", ", rank - 1, "], got ", c.dim);
  set_sizes(p, sizes_of(c.input), c.dim < 0 ? c.dim + rank : c.dim);
  p.parameters = c.parameters;
  return p;
}

// y, contiguous.
void run(const Entry& entry, const Call& c, Tensor& y, const std::optional<Tensor>& workspace = std::nullopt) {
  const SoftmaxProblem p = problem(entry, c);
  const Prepared<SoftmaxProblem> call = prepare(entry, where_of(entry, c.input), p, y.numel() > 0);
  if (y.numel() == 0) return;
  const Tensor x = as_contiguous(c.input);
  run_kernel(call, p, {x.const_data_ptr(), y.mutable_data_ptr()}, x, false, workspace);
}
Tensor empty_output(const Entry& entry, const Tensor& input) {
  dtype_of(entry, input);
  return empty(sizes_of(input), input.scalar_type(), input);
}

template <bool inference>
void forward(const Entry& entry, StableIValue* stack) {
  Arguments in(stack, inference);
  Call c;
  c.input = in.take<Tensor>(), c.dim = in.take<int64_t>(), c.parameters = in.take_parameters(entry);
  if (inference) check_inference(entry);
  Tensor output = empty_output(entry, c.input);
  run(entry, c, output);
  give(stack, 0, output);
}
void forward_out(const Entry& entry, StableIValue* stack) {
  Arguments in(stack);
  Call c;
  c.input = in.take<Tensor>(), c.dim = in.take<int64_t>();
  Tensor out = in.take<Tensor>();
  const auto workspace = in.take<std::optional<Tensor>>();
  c.parameters = in.take_parameters(entry);
  mark_written(entry, out);
  dtype_of(entry, c.input), check_place(entry, c.input, out, sizes_of(c.input), "out");
  check_apart(entry, out, c.input, "input");
  check_workspace(entry, workspace, {{&c.input, "input"}, {&out, "out"}});
  if (is_contiguous(out)) return run(entry, c, out, workspace);
  Tensor output = empty_output(entry, c.input);
  run(entry, c, output, workspace);
  torch::stable::copy_(out, output);
}

// A line of a program: softmax_<algorithm> %x dim=-1.
struct SoftmaxStep final : program::Step {
  SoftmaxProblem p{};
  const Entry& entry;

  explicit SoftmaxStep(program::Reader& r) : entry(*r.entry) {
    r.traits<SoftmaxProblem>();
    r.needs_operands(1);
    const program::Value x = r.operand(0);
    const int64_t dim = r.line.number_of("dim"), rank = static_cast<int64_t>(x.sizes.size());
    r.line.check(dim >= -rank && dim < rank, "needs a dim of the input's, got " + to_string(x.sizes));
    p.dtype = x.dtype, p.parameters = r.parameters();
    set_sizes(p, x.sizes, dim < 0 ? dim + rank : dim);
    r.rows_output(x.sizes, x.dtype);
  }
  void emit(program::Emitter& e) override {
    const int x = e.rows(e.operand(0), e.of(e.value).order, false);
    e.overwrite(x);
    e.step(entry, p, {e.at(x), e.output()});
  }
};
AI3_STEPS(softmax, SoftmaxStep)

constexpr OperatorKind kinds[] = {
    {"softmax_", "", "(Tensor input, int dim) -> Tensor", forward<false>, nullptr},
    {"_softmax_", "_out", "(Tensor input, int dim, *, Tensor(a!) out, Tensor(b!)? workspace=None) -> ()", forward_out, nullptr},
    {"_softmax_", "_infer", "(Tensor input, int numbers) -> Tensor", forward<true>, is_method<SoftmaxProblem>},
};
AI3_OPERATION(softmax, "outer size inner", kinds, std::size(kinds), nullptr, 0, AI3_QUERIES(SoftmaxProblem, problem_from))

}  // namespace
}  // namespace ai3::ops

#include "../algos/relu/problem.h"
#include "elementwise.h"

namespace ai3::ops {
namespace {

// Both tensors' elements, in whatever order y has them in memory, as rows of contiguous ones.
bool set_rows(const Tensor& x, const Tensor& y, ElementwiseProblem& p) {
  struct Dimension {
    int64_t size, x, y;
  };
  std::vector<Dimension> rest;
  for (int64_t d = 0; d < y.dim(); d++)
    if (y.size(d) > 1) rest.push_back({y.size(d), x.stride(d), y.stride(d)});
  std::sort(rest.begin(), rest.end(), [](const Dimension& a, const Dimension& b) { return a.y > b.y; });
  p.row = 1;
  for (; !rest.empty() && rest.back().x == p.row && rest.back().y == p.row; rest.pop_back()) p.row *= rest.back().size;
  p.x_row = p.y_row = p.row;
  if (rest.empty()) return true;
  p.x_row = rest.back().x, p.y_row = rest.back().y;
  for (int64_t rows = 1; !rest.empty(); rest.pop_back()) {
    if (rest.back().x != rows * p.x_row || rest.back().y != rows * p.y_row) return false;
    rows *= rest.back().size;
  }
  return p.row > 1 && p.y_row >= p.row;
}

// A new tensor. One pass over memory, whatever the order of dimensions; gaps and overlaps are copied away first.
Tensor run(const Entry& entry, const Tensor& input, const Given& given) {
  dtype_of(entry, input);
  const Tensor output = empty_as(input);
  constexpr auto one_row = [](const Tensor&, const Tensor&, ElementwiseProblem&) { return true; };  // as the problem begins
  if (same_strides(input, output))
    run_elementwise(entry, input, output, one_row, given);
  else if (!run_elementwise(entry, input, output, set_rows, given))
    run_elementwise(entry, torch::stable::clone(input), output, set_rows, given);
  return output;
}

template <bool inference>
void forward(const Entry& entry, StableIValue* stack) {
  Arguments in(stack);
  const Tensor input = in.take<Tensor>();
  const Given given{.parameters = inference ? Parameters{} : in.take_parameters(entry)};
  if (inference) check_inference(entry);
  give(stack, 0, run(entry, input, given));
}
void forward_out(const Entry& entry, StableIValue* stack) {
  Arguments in(stack);
  const Tensor input = in.take<Tensor>();
  Tensor out = in.take<Tensor>();
  const auto workspace = in.take<std::optional<Tensor>>();
  const Given given{.workspace = workspace, .parameters = in.take_parameters(entry)};
  mark_written(entry, out);
  dtype_of(entry, input), check_place(entry, input, out, sizes_of(input), "out");
  if (!same_place(out, input)) check_apart(entry, out, input, "input");
  check_workspace(entry, workspace, {{&input, "input"}, {&out, "out"}});
  if (!run_elementwise(entry, input, out, set_rows, given)) torch::stable::copy_(out, run(entry, input, given));
}

constexpr OperatorKind kinds[] = {
    {"relu_", "", "(Tensor input) -> Tensor", forward<false>, nullptr},
    {"_relu_", "_out", "(Tensor input, *, Tensor(a!) out, Tensor(b!)? workspace=None) -> ()", forward_out, nullptr},
    {"_relu_", "_infer", "(Tensor input) -> Tensor", forward<true>, is_method<ElementwiseProblem>},
};
AI3_OPERATION(relu, "count", kinds, std::size(kinds), nullptr, 0, AI3_QUERIES(ElementwiseProblem, elementwise_from))

}  // namespace
}  // namespace ai3::ops

#include "../algos/flatten/problem.h"
#include "elementwise.h"

namespace ai3::ops {
namespace {

// The sizes of the result.
Sizes flattened(const Entry& entry, const Tensor& input, int64_t asked_start, int64_t asked_end) {
  const Sizes sizes = sizes_of(input);
  const int64_t rank = std::max<int64_t>(input.dim(), 1);
  auto dimension = [&](int64_t d, const char* name) {
    check(d >= -rank && d < rank, entry, "needs ", name, " in [", -rank, ", ", rank - 1, "], got ", d);
    return d < 0 ? d + rank : d;
  };
  const int64_t start = dimension(asked_start, "start_dim"), end = dimension(asked_end, "end_dim");
  check(start <= end, entry, "needs start_dim no later than end_dim, got ", asked_start, " and ", asked_end);
  Sizes flat;
  for (int64_t d = 0; d < input.dim(); d++)
    if (d > start && d <= end)
      flat.back() = checked_mul(flat.back(), sizes[d]);
    else
      flat.push_back(sizes[d]);
  if (flat.empty()) flat = {1};
  dtype_of(entry, input), device_of(entry, input);
  return flat;
}

// Both tensors' elements in logical order, as rows of contiguous ones.
bool set_rows(const Tensor& x, const Tensor& y, ElementwiseProblem& p) {
  const std::optional<Rows> from = rows_in_order(x), to = rows_in_order(y);
  if (!from || !to) return false;
  const bool x_dense = from->row == p.count, y_dense = to->row == p.count;
  if (!x_dense && !y_dense && from->row != to->row) return false;
  p.row = std::min(from->row, to->row);
  p.x_row = x_dense ? p.row : from->apart, p.y_row = y_dense ? p.row : to->apart;
  return true;
}

void copy(const Entry& entry, const Tensor& input, Tensor& out, const Given& given) {
  if (run_elementwise(entry, input, out, set_rows, given)) return;
  const Tensor x = as_contiguous(input);
  if (run_elementwise(entry, x, out, set_rows, given)) return;
  Tensor dense = empty(sizes_of(out), out.scalar_type(), out);
  run_elementwise(entry, x, dense, set_rows, given);
  torch::stable::copy_(out, dense);
}

template <bool inference>
void forward(const Entry& entry, StableIValue* stack) {
  Arguments in(stack, inference);
  const Tensor input = in.take<Tensor>();
  const int64_t start = in.take<int64_t>(), end = in.take<int64_t>();
  const Given given{.parameters = in.take_parameters(entry)};
  if (inference) check_inference(entry);
  Tensor output = empty(flattened(entry, input, start, end), input.scalar_type(), input);
  copy(entry, input, output, given);
  give(stack, 0, output);
}
void forward_out(const Entry& entry, StableIValue* stack) {
  Arguments in(stack);
  const Tensor input = in.take<Tensor>();
  const int64_t start = in.take<int64_t>(), end = in.take<int64_t>();
  Tensor out = in.take<Tensor>();
  const auto workspace = in.take<std::optional<Tensor>>();
  const Given given{.workspace = workspace, .parameters = in.take_parameters(entry)};
  mark_written(entry, out);
  check_place(entry, input, out, flattened(entry, input, start, end), "out");
  check_apart(entry, out, input, "input");
  check_workspace(entry, workspace, {{&input, "input"}, {&out, "out"}});
  copy(entry, input, out, given);
}

constexpr OperatorKind kinds[] = {
    {"flatten_", "", "(Tensor input, int start_dim=0, int end_dim=-1) -> Tensor", forward<false>, nullptr},
    {"_flatten_", "_out", "(Tensor input, int start_dim=0, int end_dim=-1, *, Tensor(a!) out, Tensor(b!)? workspace=None) -> ()",
     forward_out, nullptr},
    {"_flatten_", "_infer", "(Tensor input, int numbers) -> Tensor", forward<true>, is_method<ElementwiseProblem>},
};
AI3_OPERATION(flatten, "count", kinds, std::size(kinds), nullptr, 0, AI3_QUERIES(ElementwiseProblem, elementwise_from))

}  // namespace
}  // namespace ai3::ops

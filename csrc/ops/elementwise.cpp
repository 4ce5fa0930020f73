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

}  // namespace

std::optional<Rows> rows_in_order(const Tensor& t) {
  Rows rows{1, 1};
  int64_t d = t.dim() - 1;
  for (; d >= 0 && (t.size(d) == 1 || t.stride(d) == rows.row); d--) rows.row *= t.size(d);
  rows.apart = rows.row;
  if (d < 0) return rows;
  rows.apart = t.stride(d);
  for (int64_t next = rows.apart; d >= 0; next *= t.size(d), d--)
    if (t.size(d) != 1 && t.stride(d) != next) return std::nullopt;
  return rows.row > 1 && rows.apart >= rows.row ? std::optional(rows) : std::nullopt;
}

bool run_elementwise(const Entry& asked, const Tensor& x, const Tensor& y,
                     bool (*lay)(const Tensor&, const Tensor&, ElementwiseProblem&), const Given& given, int32_t form) {
  ElementwiseProblem p = contiguous_elements(dtype_of(asked, x), threads(), y.numel(), form);
  p.parameters = given.parameters;
  const Prepared<ElementwiseProblem> call = prepare(asked, where_of(asked, x), p, p.count > 0);
  if (p.count == 0) return true;
  if (!lay(x, y, p) || (p.row < p.count && !call.algorithm->traits.sliced)) return false;
  run_kernel(call, p, {x.const_data_ptr(), y.mutable_data_ptr()}, x, false, given.workspace);
  return true;
}

ElementwiseProblem elementwise_from(const Query& q) {
  if (q.count != 1 && q.count != 2) throw std::runtime_error("ai3: an elementwise query needs 1 size, or also its form");
  return contiguous_elements(q.dtype, threads(), q.sizes[0], q.count > 1 ? static_cast<int32_t>(q.sizes[1]) : 0);
}

// A new tensor. One pass over memory, whatever the order of dimensions; gaps and overlaps are copied away first.
Tensor map_elements(const Entry& entry, const Tensor& input, const Given& given, int32_t form) {
  dtype_of(entry, input);
  const Tensor output = empty_as(input);
  constexpr auto one_row = [](const Tensor&, const Tensor&, ElementwiseProblem&) { return true; };  // as the problem begins
  if (same_strides(input, output))
    run_elementwise(entry, input, output, one_row, given, form);
  else if (!run_elementwise(entry, input, output, set_rows, given, form))
    run_elementwise(entry, torch::stable::clone(input), output, set_rows, given, form);
  return output;
}
void map_elements_out(const Entry& entry, const Tensor& input, const Given& given, int32_t form) {
  Tensor out = *given.out;
  mark_written(entry, out);
  dtype_of(entry, input), check_place(entry, input, out, sizes_of(input), "out");
  if (!same_place(out, input)) check_apart(entry, out, input, "input");
  check_workspace(entry, given.workspace, {{&input, "input"}, {&out, "out"}});
  if (!run_elementwise(entry, input, out, set_rows, given, form))
    torch::stable::copy_(out, map_elements(entry, input, given, form));
}
void map_forward_out(const Entry& entry, StableIValue* stack) {
  Arguments in(stack);
  const Tensor input = in.take<Tensor>();
  Given given{.out = in.take<Tensor>()};
  given.workspace = in.take<std::optional<Tensor>>(), given.parameters = in.take_parameters(entry);
  map_elements_out(entry, input, given);
}

namespace program {
ElementwiseStep::ElementwiseStep(Reader& r, int32_t form) : entry(*r.entry) {
  const bool sliced = r.traits<ElementwiseProblem>().sliced;
  r.needs_operands(1);
  const Value x = r.operand(0);
  p = contiguous_elements(x.dtype, threads(), count_of(x.sizes), form);
  p.parameters = r.parameters();
  writes_slices = sliced;
  r.output(x.sizes, x.dtype, x.order);
}
void ElementwiseStep::emit(Emitter& e) {
  const Sizes order = e.of(e.value).order;
  const int x = e.rows(e.operand(0), order, writes_slices);
  e.overwrite(x);
  p.row = e.of(e.value).innermost(), p.x_row = e.row(x, order), p.y_row = e.row(e.value, order);
  if (p.x_row == p.row && p.y_row == p.row) p.row = p.x_row = p.y_row = p.count;
  e.step(entry, p, {e.at(x), e.output()});
}
}  // namespace program

}  // namespace ai3::ops

#include "elementwise.h"

namespace ai3::ops {

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
                     bool (*set_rows)(const Tensor&, const Tensor&, ElementwiseProblem&), const Given& given) {
  ElementwiseProblem p = contiguous_elements(dtype_of(asked, x), threads(y.numel()), y.numel());
  p.parameters = given.parameters;
  const Prepared<ElementwiseProblem> call = prepare(asked, where_of(asked, x), p, p.count > 0);
  if (p.count == 0) return true;
  if (!set_rows(x, y, p) || (p.row < p.count && !call.algorithm->traits.sliced)) return false;
  run_kernel(call, p, {x.const_data_ptr(), y.mutable_data_ptr()}, x, false, given.workspace);
  return true;
}

ElementwiseProblem elementwise_from(const Query& q) {
  if (q.count != 1) throw std::runtime_error("ai3: an elementwise query needs 1 size");
  return contiguous_elements(q.dtype, threads(), q.sizes[0]);
}

}  // namespace ai3::ops

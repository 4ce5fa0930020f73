// What passes over elements (relu, flatten) share.
#pragma once
#include "../algos/core/elementwise_problem.h"
#include "tensors.h"

namespace ai3::ops {

// Elements in logical order as rows of `row` contiguous ones, `apart` from each other.
struct Rows {
  int64_t row, apart;
};
std::optional<Rows> rows_in_order(const Tensor& t);
// One pass over the elements of x and y, which lie as `rows_of(problem)` sets them, if it can and the algorithm takes slices.
// False where nothing was done because they lie otherwise.
bool run_elementwise(const Entry& asked, const Tensor& x, const Tensor& y,
                     bool (*set_rows)(const Tensor&, const Tensor&, ElementwiseProblem&), const Given& given);
ElementwiseProblem elementwise_from(const Query& q);

}  // namespace ai3::ops

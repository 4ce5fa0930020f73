// One pass over `count` elements: contiguous or, for `sliced` algorithms, in rows of `row` elements, x_row and y_row apart. y may
// be x itself.
#pragma once
#include "algorithm.h"

namespace ai3 {

struct ElementwiseProblem {
  using Operands = UnaryOperands;
  using Gradients = UnaryGradients;
  DType dtype;
  int32_t threads;
  int64_t count;
  int64_t row, x_row, y_row;  // all `count` where everything is contiguous
  Parameters parameters = {};
  int32_t form = 0;  // of operations that have several functions, as gelu: 0 by erf, 1 by tanh
};
AI3_INLINE bool sizes_known(const ElementwiseProblem& p) { return p.count >= 0; }
AI3_INLINE auto value_of(const ElementwiseProblem& p) {
  const auto& [dtype, threads, count, row, x_row, y_row, parameters, form] = p;
  return as_numbers(dtype, threads, count, row, x_row, y_row, parameters, form);
}
AI3_INLINE ElementwiseProblem contiguous_elements(DType dtype, int32_t threads, int64_t count, int32_t form = 0) {
  return {dtype, threads, count, count, count, count, {}, form};
}

}  // namespace ai3

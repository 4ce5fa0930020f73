// What passes over elements (relu, gelu, silu, flatten) share.
#pragma once
#include "../algos/core/elementwise_problem.h"
#include "prepare/run.h"
#include "program/step.h"

namespace ai3::ops {

// Elements in logical order as rows of `row` contiguous ones, `apart` from each other.
struct Rows {
  int64_t row, apart;
};
std::optional<Rows> rows_in_order(const Tensor& t);
// One pass over the elements of x and y, which lie as `lay` sets them in the problem, if it can and the algorithm takes slices.
// False where nothing was done because they lie otherwise.
bool run_elementwise(const Entry& asked, const Tensor& x, const Tensor& y,
                     bool (*lay)(const Tensor&, const Tensor&, ElementwiseProblem&), const Given& given, int32_t form = 0);
ElementwiseProblem elementwise_from(const Query& q);

// Functions of an element, whose output lies as the input does. `form`: that of the problem.
Tensor map_elements(const Entry& entry, const Tensor& input, const Given& given, int32_t form = 0);
// Into `given.out`, which may be the input.
void map_elements_out(const Entry& entry, const Tensor& input, const Given& given, int32_t form = 0);

// The operators of those that have one form.
template <bool inference>
void map_forward(const Entry& entry, StableIValue* stack) {
  Arguments in(stack);
  const Tensor input = in.take<Tensor>();
  const Given given{.parameters = inference ? Parameters{} : in.take_parameters(entry)};
  if (inference) check_inference(entry);
  give(stack, 0, map_elements(entry, input, given));
}
void map_forward_out(const Entry& entry, StableIValue* stack);

namespace program {
// A line "<operation>_<algorithm> %x": the value in whatever order x has.
struct ElementwiseStep : Step {
  explicit ElementwiseStep(Reader& r, int32_t form = 0);
  void emit(Emitter& e) override;
  ElementwiseProblem p{};
  const Entry& entry;
};
}  // namespace program

}  // namespace ai3::ops

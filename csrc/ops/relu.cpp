#include "tensors.h"

namespace ai3::ops {
namespace {

// One pass over memory, whatever the order of dimensions; gaps and overlaps are copied away first.
template <bool inference>
void forward(const Entry& entry, StableIValue* stack) {
  const Tensor input = Arguments(stack).take<Tensor>();
  if (inference) check_inference(entry);
  dtype_of(entry, input), device_of(entry, input);
  Tensor output = empty_as(input);
  bool same = true;
  for (int64_t d = 0; d < input.dim(); d++) same &= input.size(d) == 1 || input.stride(d) == output.stride(d);
  run_elementwise(entry, same ? input : torch::stable::clone(input), output);
  give(stack, 0, output);
}

constexpr OperatorKind kinds[] = {
    {"relu_", "", "(Tensor input) -> Tensor", forward<false>, nullptr},
    {"_relu_", "_infer", "(Tensor input) -> Tensor", forward<true>, is_method<ElementwiseProblem>},
};
AI3_OPERATION(relu, "count", kinds, std::size(kinds), nullptr, 0, AI3_QUERIES(ElementwiseProblem, elementwise_from))

}  // namespace
}  // namespace ai3::ops

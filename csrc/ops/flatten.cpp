#include "tensors.h"

namespace ai3::ops {
namespace {

template <bool inference>
void forward(const Entry& entry, StableIValue* stack) {
  Arguments in(stack, inference);
  const Tensor input = in.take<Tensor>();
  const int64_t asked_start = in.take<int64_t>(), asked_end = in.take<int64_t>();
  if (inference) check_inference(entry);
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
  Tensor output = empty(flat, input.scalar_type(), input);
  run_elementwise(entry, as_contiguous(input), output);
  give(stack, 0, output);
}

constexpr OperatorKind kinds[] = {
    {"flatten_", "", "(Tensor input, int start_dim=0, int end_dim=-1) -> Tensor", forward<false>, nullptr},
    {"_flatten_", "_infer", "(Tensor input, str numbers) -> Tensor", forward<true>, is_method<ElementwiseProblem>},
};
AI3_OPERATION(flatten, "count", kinds, std::size(kinds), nullptr, 0, AI3_QUERIES(ElementwiseProblem, elementwise_from))

}  // namespace
}  // namespace ai3::ops

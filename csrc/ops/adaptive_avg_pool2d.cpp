#include "pool2d.h"

namespace ai3::ops {
namespace {

template <bool inference>
void forward(const Entry& entry, StableIValue* stack) {
  Arguments in(stack, inference);
  const Tensor input = in.take<Tensor>();
  const Sizes sizes = in.take_list(2);
  if (inference) check_inference(entry);
  give(stack, 0, adaptive_pool2d_run(entry, input, sizes));
}

constexpr OperatorKind kinds[] = {
    {"adaptive_avg_pool2d_", "", "(Tensor input, int[2] output_size) -> Tensor", forward<false>, nullptr},
    {"_adaptive_avg_pool2d_", "_infer", "(Tensor input, str numbers) -> Tensor", forward<true>, is_method<Pool2dProblem>},
};
AI3_OPERATION(adaptive_avg_pool2d, "batch channels in_height in_width out_height out_width channels_last", kinds,
              std::size(kinds), nullptr, 0, AI3_QUERIES(Pool2dProblem, adaptive_pool2d_from))

}  // namespace
}  // namespace ai3::ops

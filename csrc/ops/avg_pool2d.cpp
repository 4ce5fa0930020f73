#include "pool2d.h"

namespace ai3::ops {
namespace {

template <bool inference>
void forward(const Entry& entry, StableIValue* stack) {
  Arguments in(stack, inference);
  Pool2dCall c{.input = in.take<Tensor>(),
               .kernel = in.take_list(2),
               .stride = in.take_list(2),
               .padding = in.take_list(2),
               .dilation = {1, 1},
               .ceil_mode = in.take<bool>(),
               .count_include_pad = in.take<bool>(),
               .divisor = in.take<std::optional<int64_t>>()};
  if (inference) check_inference(entry);
  give(stack, 0, pool2d_run(entry, c));
}

constexpr OperatorKind kinds[] = {
    {"avg_pool2d_", "",
     "(Tensor input, int[2] kernel_size, int[2] stride=[], int[2] padding=0, bool ceil_mode=False, bool count_include_pad=True, "
     "int? divisor_override=None) -> Tensor",
     forward<false>, nullptr},
    {"_avg_pool2d_", "_infer", "(Tensor input, str numbers) -> Tensor", forward<true>, is_method<Pool2dProblem>},
};
AI3_OPERATION(avg_pool2d, AI3_POOL2D_SIZES, kinds, std::size(kinds), nullptr, 0, AI3_QUERIES(Pool2dProblem, pool2d_from))

}  // namespace
}  // namespace ai3::ops

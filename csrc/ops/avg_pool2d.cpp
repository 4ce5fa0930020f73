#include "pool2d.h"

namespace ai3::ops {
namespace {

constexpr auto run = [](const Entry& entry, Arguments& in, const auto& take_rest) {
  Pool2dCall c{.input = in.take<Tensor>(),
               .kernel = in.take_list(2),
               .stride = in.take_list(2),
               .padding = in.take_list(2),
               .dilation = {1, 1},
               .ceil_mode = in.take<bool>(),
               .count_include_pad = in.take<bool>(),
               .divisor = in.take<std::optional<int64_t>>()};
  return pool2d_run(entry, c, take_rest());
};

AI3_POOLING_OPERATORS(
    "avg_pool2d", run,
    "Tensor input, int[2] kernel_size, int[2] stride=[], int[2] padding=0, bool ceil_mode=False, bool count_include_pad=True, "
    "int? divisor_override=None")
AI3_STEPS(avg_pool2d, WindowStep)
AI3_OPERATION(avg_pool2d, AI3_POOL2D_SIZES, kinds, std::size(kinds), nullptr, 0, AI3_QUERIES(Pool2dProblem, pool2d_from))

}  // namespace
}  // namespace ai3::ops

#include "pool2d.h"

namespace ai3::ops {
namespace {

constexpr auto run = [](const Entry& entry, Arguments& in, const auto& take_rest) {
  Pool2dCall c{.input = in.take<Tensor>(),
               .kernel = in.take_list(2),
               .stride = in.take_list(2),
               .padding = in.take_list(2),
               .dilation = in.take_list(2),
               .ceil_mode = in.take<bool>()};
  return pool2d_run(entry, c, take_rest());
};

AI3_POOLING_OPERATORS(
    "max_pool2d", run,
    "Tensor input, int[2] kernel_size, int[2] stride=[], int[2] padding=0, int[2] dilation=1, bool ceil_mode=False")
AI3_STEPS(max_pool2d, WindowStep)
AI3_OPERATION(max_pool2d, AI3_POOL2D_SIZES, kinds, std::size(kinds), nullptr, 0, AI3_QUERIES(Pool2dProblem, pool2d_from))

}  // namespace
}  // namespace ai3::ops

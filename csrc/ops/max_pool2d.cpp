#include "pool2d.h"

namespace ai3::ops {
namespace {

void forward(const Entry& entry, StableIValue* stack) {
  Arguments in(stack);
  Pool2dCall c{.input = in.take<Tensor>(),
               .kernel = in.take<Sizes>(),
               .stride = in.take<Sizes>(),
               .padding = in.take<Sizes>(),
               .dilation = in.take<Sizes>(),
               .ceil_mode = in.take<bool>()};
  give(stack, 0, pool2d_run(entry, c));
}

constexpr OperatorKind kinds[] = {
    {"max_pool2d_", "",
     "(Tensor input, int[2] kernel_size, int[2] stride=[], int[2] padding=0, int[2] dilation=1, bool ceil_mode=False) -> Tensor",
     forward, nullptr},
};
AI3_OPERATION(max_pool2d, AI3_POOL2D_SIZES, kinds, std::size(kinds), nullptr, 0, AI3_QUERIES(Pool2dProblem, pool2d_from))

}  // namespace
}  // namespace ai3::ops

#include "pool2d.h"

namespace ai3::ops {
namespace {

constexpr auto run = [](const Entry& entry, Arguments& in, const auto& take_rest) {
  const Tensor input = in.take<Tensor>();
  const Sizes sizes = in.take_list(2);
  return adaptive_pool2d_run(entry, input, sizes, take_rest());
};

AI3_POOLING_OPERATORS("adaptive_avg_pool2d", run, "Tensor input, int[2] output_size")
AI3_STEPS(adaptive_avg_pool2d, AdaptiveStep)
AI3_OPERATION(adaptive_avg_pool2d, "batch channels in_height in_width out_height out_width channels_last", kinds,
              std::size(kinds), nullptr, 0, AI3_QUERIES(Pool2dProblem, adaptive_pool2d_from))

}  // namespace
}  // namespace ai3::ops

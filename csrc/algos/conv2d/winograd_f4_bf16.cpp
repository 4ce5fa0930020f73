// Winograd F(4x4, 3x3) whose transformed weights are stored in bfloat16: half the bytes, which is what limits layers of many
// channels and few pixels. Arithmetic stays in float32. Approximate: only asked for by name. (float64 tensors keep their digits.)
#include "problem.h"
#include "winograd.h"

namespace ai3::inline AI3_LEVEL {
namespace {

template <class A>
struct Halved {
  using type = bfloat16;
};
template <>
struct Halved<double> {
  using type = double;
};
template <class A>
using StoredHalf = typename Halved<A>::type;

template <class T>
void conv2d_winograd_f4_bf16(const Conv2dProblem& p, const Conv2dOperands& buffers, Workspace& workspace) {
  TransformDomain<Winograd<4>, T, StoredHalf<Acc<T>>>(p).run(buffers, workspace);
}

AI3_ALGORITHM(conv2d, winograd_f4_bf16, .accuracy = Accuracy::approximate, .error_bound = 6e-2,
              AI3_WINOGRAD_TRAITS(Winograd<4>, StoredHalf), .gradients = by_patches, .sliced = true)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

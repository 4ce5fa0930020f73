// Winograd's minimal filtering for kernels of other sizes than 3x3: F(2x2, 5x5), 36 products instead of 100; and in one dimension
// F(4, 7), 10 instead of 28, and F(4, 3), 6 instead of 12. 3x3 kernels get F(2x4, 3x3), between F(2x2) and F(4x4): 24 instead
// of 72.
#include "delegated.h"
#include "problem.h"
#include "winograd_gradient.h"

namespace ai3::inline AI3_LEVEL {
namespace {

using One = ToomCook<1, 1>;
using Between = Nested<ToomCook<2, 3>, ToomCook<4, 3>>;

struct FormForKernel {
  template <class Body>
  AI3_INLINE static auto with(const Conv2dProblem& p, const Body& body) {
    switch (p.kernel_height * 8 + p.kernel_width) {
      case 1 * 8 + 3: return body.template operator()<Nested<One, ToomCook<4, 3>>>();
      case 3 * 8 + 1: return body.template operator()<Nested<ToomCook<4, 3>, One>>();
      case 1 * 8 + 7: return body.template operator()<Nested<One, ToomCook<4, 7>>>();
      case 7 * 8 + 1: return body.template operator()<Nested<ToomCook<4, 7>, One>>();
      case 5 * 8 + 5: return body.template operator()<Nested<ToomCook<2, 5>, ToomCook<2, 5>>>();
      default: return body.template operator()<Between>();
    }
  }
};
using Forms = ChosenTransformTraits<FormForKernel>;

// dW of a 3x3 kernel has no weights to transform beforehand: F(4x4), whose error has the same bound, where it has less to do.
struct FormForWeightGradient {
  template <class Body>
  AI3_INLINE static auto with(const Conv2dProblem& p, const Body& body) {
    const bool square = p.kernel_height == 3 && p.kernel_width == 3;
    if (square && weight_work<Winograd<4>>(p) < weight_work<Between>(p)) return body.template operator()<Winograd<4>>();
    return FormForKernel::with(p, body);
  }
};

template <class T>
void conv2d_winograd_general(const Conv2dProblem& p, const Conv2dOperands& buffers, Workspace& workspace) {
  Forms::run<T>(p, buffers, workspace);
}

AI3_ALGORITHM(conv2d, winograd_general, .accuracy = Accuracy::bounded, .error_bound = 2e-5, .epilogue = true,
              .supports = winograd_supports_any, .workspace = Forms::workspace, .cost = Forms::cost,
              .packed_bytes = Forms::packed_bytes, .pack = Forms::pack,
              AI3_WINOGRAD_GRADIENTS("winograd_general", FormForKernel, FormForWeightGradient), .sliced = true)

}  // namespace

const Algorithm<Conv2dProblem>& conv2d_winograd_general_record() { return conv2d_winograd_general_algorithm; }

}  // namespace ai3::inline AI3_LEVEL

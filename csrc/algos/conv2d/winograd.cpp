// A rule; the kernels are in winograd_f2.cpp, winograd_f4.cpp and winograd_general.cpp, of which each is a few lines: the
// transforms are in winograd.h, and transform_domain.h takes tiles through them and the products between.
//
// 3x3 kernels: F(4x4, 3x3) or F(2x2, 3x3), whichever has less work: the larger of its arithmetic and its memory traffic, counted.
// Large maps go to F4. On small ones its tiles reach past the edge, and its weights, 36/16 of F2's, must be read for few of them.
// Never F6: accuracy. Other kernels: the one form for their size.
#include "winograd.h"

#include "../core/work.h"
#include "problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

Choice choose_form(const Conv2dProblem& p, const Candidates<Conv2dProblem>& usable) {
  auto small = [&] {
    if (p.batch < 0 || p.in_channels < 0 || p.out_channels < 0 || p.out_height < 0 || p.out_width < 0) return false;  // a query's
    return work(TransformDomainTraits<Winograd<2>>::cost(p)) < work(TransformDomainTraits<Winograd<4>>::cost(p));
  };
  Choice choice{"winograd_f4", "less work than F(2x2, 3x3)"};
  if (p.kernel_height != 3 || p.kernel_width != 3)
    choice = {"winograd_general", "the form for this kernel"};
  else if (small())
    choice = {"winograd_f2", "less work than F(4x4, 3x3) on a map this small"};
  else if (!usable(p, "winograd_f4"))
    choice = {"winograd_f2", "F(4x4, 3x3) is excluded"};
  return usable(p, choice.algorithm) ? choice : Choice{};
}

AI3_ALGORITHM_WITHOUT_KERNEL(conv2d, winograd, .accuracy = Accuracy::bounded, .error_bound = 2e-5,
                             .supports = winograd_supports_any, .choose = choose_form)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

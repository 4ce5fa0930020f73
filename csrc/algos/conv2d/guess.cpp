// The lowest modelled time: arithmetic at the share of the measured peak that a method reaches, or memory traffic at the measured
// bandwidth, whichever takes longer (Williams, Waterman & Patterson, "Roofline", 2009).
#include <math.h>

#include "../core/machine.h"
#include "problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

constexpr double kErrorBound = 5e-5;  // of what may be chosen unasked: Winograd F(6x6, 3x3) may not

Choice choose(const Conv2dProblem& p, const Candidates<Conv2dProblem>& usable) {
  const Machine m = machine(1);  // one core's: the choice must not depend on the number of threads
  // Which of two times is lower depends on the machine only through operations per byte.
  const double balance = steady_balance(m, Vec<float>::width) * (p.dtype == DType::f64 ? .5 : 1);
  Conv2dProblem known = p;  // a query may leave sizes open: then it is about the smallest
  for (int64_t* size : {&known.batch, &known.in_channels, &known.in_height, &known.in_width, &known.out_channels,
                        &known.kernel_height, &known.kernel_width, &known.out_height, &known.out_width, &known.stride_h,
                        &known.stride_w, &known.dilation_h, &known.dilation_w, &known.groups})
    *size = *size < 1 ? 1 : *size;
  const char* best = nullptr;
  double least = INFINITY;
  usable.each(p, [&](const char* name, const Traits<Conv2dProblem>& traits) {
    if (!traits.cost || traits.accuracy == Accuracy::approximate || traits.error_bound > kErrorBound) return;
    const Cost c = traits.cost(known);
    const double compute = c.flops / c.efficiency, memory = c.bytes * balance, time = compute > memory ? compute : memory;
    if (time < least || (best && time == least && __builtin_strcmp(name, best) < 0)) best = name, least = time;
  });
  return {best, "the lowest modelled time"};
}

AI3_ALGORITHM_WITHOUT_KERNEL(conv2d, guess, .accuracy = Accuracy::bounded, .error_bound = kErrorBound, .choose = choose)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

// The counter that kernels compiled with AI3_COUNT_OPERATIONS add to.
#include "../../csrc/algos/core/algorithm.h"

namespace ai3::inline AI3_LEVEL {
int64_t multiplications = 0;
}  // namespace ai3::inline AI3_LEVEL

int64_t take_multiplications() {
  const int64_t n = ai3::multiplications;
  ai3::multiplications = 0;
  return n;
}

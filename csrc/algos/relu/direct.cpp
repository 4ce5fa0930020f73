// thin first version
#include "../core/algorithm.h"

namespace ai3::inline AI3_LEVEL {
namespace {

template <class T>
void relu_direct(const ElementwiseProblem& p, const T* x, T* y, Workspace&) {
  for (int64_t i = 0; i < p.count; i++) y[i] = widen(x[i]) < 0 ? T{} : x[i];
}

AI3_ALGORITHM(relu, direct)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

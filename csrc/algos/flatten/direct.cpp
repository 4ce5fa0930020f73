// thin first version
#include "../core/algorithm.h"

namespace ai3::inline AI3_LEVEL {
namespace {

template <class T>
void flatten_direct(const ElementwiseProblem& p, const T* x, T* y, Workspace&) {
  __builtin_memcpy(y, x, p.count * sizeof(T));
}

AI3_ALGORITHM(flatten, direct)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

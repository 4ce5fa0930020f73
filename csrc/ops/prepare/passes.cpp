#include "passes.h"

#include <stdexcept>

#include "../../algos/core/level.h"

extern "C" {
extern const ai3::ProgramKernels* const __start_ai3_program_kernels[];
extern const ai3::ProgramKernels* const __stop_ai3_program_kernels[];
}

namespace ai3::ops {

const ProgramKernels& passes() {
  static const ProgramKernels& found = []() -> const ProgramKernels& {
    for (auto k = __start_ai3_program_kernels; k != __stop_ai3_program_kernels; k++)
      if (level() == (*k)->level) return **k;
    throw std::runtime_error("ai3: no passes for level " + level());
  }();
  return found;
}

void join_rows(CopyProblem& p) {
  constexpr int64_t kShort = 64;
  if (p.batch >= p.threads && p.width < kShort && p.x_stride.h == p.width * p.x_stride.w &&
      p.y_stride.h == p.width * p.y_stride.w)
    p.width *= p.height, p.height = 1;
}

}  // namespace ai3::ops

// Winograd's convolution (Lavin & Gray 2015): cuDNN's, in one kernel, on GPUs for which it has one; on those of compute
// capability 9.0 and later, for which it has none, F(4x4, 3x3) by our transforms and cuBLAS (winograd_f4).
#include "../../algos/conv2d/delegated.h"
#include "../core/cudnn.cuh"
#include "../core/host.h"

namespace ai3::inline AI3_LEVEL {
namespace {

using By = Cudnn<CUDNN_CONVOLUTION_FWD_ALGO_WINOGRAD>;
using Own = Delegated<conv2d_winograd_f4_record>;

bool is_own() { return current_capability() >= 90; }

bool supports(const Conv2dProblem& p, Reason& reason) { return is_own() ? Own::supports(p, reason) : By::supports(p, reason); }
// Ours transforms the weight in every call: packs are the CPU's rule's, which chooses among others. `winograd_f4` keeps them.
int64_t workspace(const Conv2dProblem& p) {
  return is_own() ? checked_add(Own::workspace(p), Own::packed_bytes(p)) : By::workspace(p);
}
void run(const Conv2dProblem& p, const Conv2dOperands& m, Workspace& workspace) {
  if (!is_own()) return By::run(p, m, workspace);
  Conv2dOperands packed = m;
  packed.weight = take<char>(workspace, Own::packed_bytes(p));
  Own::pack(p, m.weight, packed.weight, workspace);
  Own::run(p, packed, workspace);
}

AI3_REGISTER_(conv2d, winograd, run, .accuracy = Accuracy::bounded, .error_bound = 4e-5, .supports = supports,
              .workspace = workspace, .gradients = gradients_by_im2col)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

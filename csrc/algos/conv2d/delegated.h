// Algorithms of conv2d that another one runs: conv1d's, on images of height 1.
#pragma once
#include "problem.h"

namespace ai3::inline AI3_LEVEL {

const Algorithm<Conv2dProblem>& conv2d_cudnn_record();  // on CUDA
const Algorithm<Conv2dProblem>& conv2d_depthwise_record();
const Algorithm<Conv2dProblem>& conv2d_direct_record();
const Algorithm<Conv2dProblem>& conv2d_fft_record();
const Algorithm<Conv2dProblem>& conv2d_im2col_record();
const Algorithm<Conv2dProblem>& conv2d_implicit_precomp_gemm_record();
const Algorithm<Conv2dProblem>& conv2d_patch_gemm_record();
const Algorithm<Conv2dProblem>& conv2d_winograd_f4_record();  // on CUDA
const Algorithm<Conv2dProblem>& conv2d_winograd_general_record();

// The functions of such a record. A record of another file is no constant, the address of these is.
template <const Algorithm<Conv2dProblem>& (*record)()>
struct Delegated {
  static bool supports(const Conv2dProblem& p, Reason& reason) { return record().traits.supports(p, reason); }
  static void run(const Conv2dProblem& p, const Conv2dOperands& m, Workspace& workspace) { record().run(p, m, workspace); }
  static int64_t workspace(const Conv2dProblem& p) {
    const auto bytes = record().traits.workspace;
    return bytes ? bytes(p) : 0;
  }
  static Cost cost(const Conv2dProblem& p) { return record().traits.cost(p); }
  static int64_t packed_bytes(const Conv2dProblem& p) { return record().traits.packed_bytes(p); }
  static void pack(const Conv2dProblem& p, const Operand& weight, const Operand& packed, Workspace& workspace) {
    record().traits.pack(p, weight, packed, workspace);
  }
  static GradientNames gradients(const Conv2dProblem& p) { return record().traits.gradients(p); }
};

}  // namespace ai3::inline AI3_LEVEL

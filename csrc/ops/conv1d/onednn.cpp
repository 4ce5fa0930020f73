// conv2d's onednn on images of height 1.
#include "../tensor/onednn.h"

#include "../../algos/conv1d/problem.h"
#include "../conv2d.h"

namespace ai3::ops {

const Algorithm<Conv2dProblem>& conv2d_onednn_record();

namespace {

void conv1d_onednn(const Conv2dProblem& p, void* call) { conv2d_onednn_record().traits.tensors(p, call); }
int64_t workspace(const Conv2dProblem& p) { return conv2d_onednn_record().traits.workspace(p); }

AI3_ALGORITHM_WITHOUT_KERNEL(conv1d, onednn, .deterministic = false, .dtypes = kOneDnnDtypes,
                             .supports = onednn_supports<Conv2dProblem>, .workspace = workspace, .tensors = conv1d_onednn)

}  // namespace
}  // namespace ai3::ops

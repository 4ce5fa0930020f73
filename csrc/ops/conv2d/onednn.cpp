// oneDNN's convolution through the copy that PyTorch bundles, so that no second thread pool comes in.
#include "../onednn.h"

#include "../conv2d.h"

namespace ai3::ops {
namespace {

void conv2d_onednn(const Conv2dProblem&, void* call) {
  auto& c = *static_cast<Conv2dCall*>(call);
  const Tensor x = dense(c.input, c.channels_last), w = dense(c.weight, c.channels_last);
  if (c.bias) c.bias = as_contiguous(*c.bias);  // oneDNN would read it as if it were
  c.output =
      dense(call_aten("aten::mkldnn_convolution", "", x, w, c.bias, c.padding, c.stride, c.dilation, c.groups), c.channels_last);
}

AI3_ALGORITHM_WITHOUT_KERNEL(conv2d, onednn, .dtypes = kOneDnnDtypes, .supports = onednn_supports<Conv2dProblem>,
                             .tensors = conv2d_onednn)

}  // namespace
}  // namespace ai3::ops

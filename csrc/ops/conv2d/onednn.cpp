// oneDNN's convolution through the copy that PyTorch bundles, so that no second thread pool comes in.
#include "../onednn.h"

#include "../conv2d.h"

namespace ai3::ops {
namespace {

void conv2d_onednn(const Conv2dProblem& p, void* call) {
  auto& c = *static_cast<Conv2dCall*>(call);
  // One input channel in channels_last lies in memory as in NCHW, but oneDNN's path for that format reads past it (seen with a
  // kernel that leaves one column; docs/pytorch.md), so it gets NCHW's strides.
  const bool channels_last = c.channels_last && p.in_channels > 1;
  auto operand = [&](const Tensor& t) { return with_dense_strides(dense(t, channels_last), channels_last); };
  const Tensor x = operand(c.input), w = operand(c.weight);
  if (c.bias) c.bias = as_contiguous(*c.bias);  // oneDNN would read it as if it were
  c.output =
      dense(call_aten("aten::mkldnn_convolution", "", x, w, c.bias, c.padding, c.stride, c.dilation, c.groups), c.channels_last);
}

AI3_ALGORITHM_WITHOUT_KERNEL(conv2d, onednn, .dtypes = kOneDnnDtypes, .supports = onednn_supports<Conv2dProblem>,
                             .tensors = conv2d_onednn)

}  // namespace
}  // namespace ai3::ops

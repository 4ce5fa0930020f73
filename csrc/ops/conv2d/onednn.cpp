// oneDNN's convolution through the copy that PyTorch bundles, so that no second thread pool comes in. Where the call has a slot
// for packs, the weight is reordered once, into the blocked form that oneDNN wants (PyTorch's opaque kind of tensor). With few
// channels it multiplies matrices of patches, whose sums it splits by the number of threads: the last bits depend on that.
#include "../tensor/onednn.h"

#include "../conv2d.h"
#include "../dispatch/hash.h"

namespace ai3::ops {
namespace {

void conv2d_onednn(const Conv2dProblem& p, void* call) {
  auto& c = *static_cast<Conv2dCall*>(call);
  // One input channel in channels_last lies in memory as in NCHW, but oneDNN's path for that format reads past it (seen with a
  // kernel that leaves one column; docs/pytorch.md), so it gets NCHW's strides.
  const bool channels_last = c.channels_last && p.in_channels > 1;
  auto operand = [&](const Tensor& t) { return with_dense_strides(dense(t, channels_last), channels_last); };
  const Tensor x = operand(c.input);
  if (c.bias) c.bias = as_contiguous(*c.bias);  // oneDNN would read it as if it were
  // The form depends on the window; on the input's size, too, but only in what is fastest.
  const std::array window{p.stride_h, p.stride_w, p.pad_h, p.pad_w, p.dilation_h, p.dilation_w, p.groups};
  const PackKey key{c.algorithm, Hash().add(window).value(), c.input.scalar_type()};
  // With one input channel and one output column, a stride along the row and AVX-512 it reads past the input, too, where the
  // weight is reordered (docs/pytorch.md): there the weight is given as it is.
  const bool reads_past = p.in_channels == 1 && p.out_width == 1 && p.stride_w > 1;
  auto reorder = [&](const Tensor& w) {
    return call_aten("mkldnn::_reorder_convolution_weight", "", w, c.padding, c.stride, c.dilation, c.groups,
                     std::optional<Sizes>(sizes_of(x)));
  };
  const std::optional<Tensor> reordered = reads_past ? std::nullopt : kept(c.slot, key, c.weight, products_of(c), reorder);
  const Tensor y = reordered ? call_aten("mkldnn::_convolution_pointwise", "", x, *reordered, c.bias, c.padding, c.stride,
                                         c.dilation, c.groups, std::string("none"), Sizes{}, std::optional<std::string>(""))
                             : call_aten("aten::mkldnn_convolution", "", x, operand(c.weight), c.bias, c.padding, c.stride,
                                         c.dilation, c.groups);
  c.result = dense(y, c.channels_last);
}

int64_t workspace(const Conv2dProblem& p) {
  return checked_mul(p.groups, reordered_bytes(p.dtype, p.out_channels / p.groups, p.in_channels / p.groups,
                                               checked_mul(p.kernel_height, p.kernel_width)));
}

AI3_ALGORITHM_WITHOUT_KERNEL(conv2d, onednn, .deterministic = false, .dtypes = kOneDnnDtypes,
                             .supports = onednn_supports<Conv2dProblem>, .workspace = workspace, .tensors = conv2d_onednn)

}  // namespace

const Algorithm<Conv2dProblem>& conv2d_onednn_record() { return conv2d_onednn_algorithm; }

}  // namespace ai3::ops

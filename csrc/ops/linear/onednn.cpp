// oneDNN's inner product through the copy that PyTorch bundles.
#include "../tensor/onednn.h"

#include "../linear.h"

namespace ai3::ops {
namespace {

void linear_onednn(const LinearProblem& p, void* call) {
  auto& c = *static_cast<LinearCall*>(call);
  const Tensor x = torch::stable::reshape(c.input, Sizes{p.rows, p.in_features});
  const Tensor w = torch::stable::reshape(c.weight, Sizes{p.out_features, p.in_features});
  if (c.bias) c.bias = as_contiguous(*c.bias);  // oneDNN would read it as if it were
  const Tensor y = call_aten("mkldnn::_linear_pointwise", "", as_contiguous(x), as_contiguous(w), c.bias, std::string("none"),
                             Sizes{}, std::optional<std::string>(""));
  Sizes sizes = sizes_of(c.input);
  sizes.pop_back();
  if (c.weight.dim() == 2) sizes.push_back(p.out_features);
  c.result = torch::stable::reshape(y, sizes);
}

int64_t workspace(const LinearProblem& p) { return reordered_bytes(p.dtype, p.out_features, p.in_features, 1); }

AI3_ALGORITHM_WITHOUT_KERNEL(linear, onednn, .dtypes = kOneDnnDtypes, .supports = onednn_supports<LinearProblem>,
                             .workspace = workspace, .tensors = linear_onednn)

}  // namespace
}  // namespace ai3::ops

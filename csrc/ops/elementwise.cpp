#include "tensors.h"

namespace ai3::ops {

void run_elementwise(const Entry& asked, const Tensor& x, Tensor& y) {
  const ElementwiseProblem p{dtype_of(asked, x), threads(y.numel()), y.numel()};
  const Chosen<ElementwiseProblem> chosen(asked, device_of(asked, x), p);
  if (p.count > 0) run_kernel(chosen, p, {x.const_data_ptr(), nullptr, nullptr, nullptr, y.mutable_data_ptr()}, x);
}

ElementwiseProblem elementwise_from(const Query& q) {
  if (q.count != 1) throw std::runtime_error("ai3: an elementwise query needs 1 size");
  return {q.dtype, threads(), q.sizes[0]};
}

}  // namespace ai3::ops

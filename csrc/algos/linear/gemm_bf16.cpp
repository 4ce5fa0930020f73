// y = x * w^T of float32 tensors in bfloat16: x and w are rounded to it, products are exact and are summed in float32 (Kalamkar
// et al., "A study of BFLOAT16 for deep learning training", 2019). Without AVX512-BF16 only w is rounded, and widened again as
// it is loaded: half of the bytes come from memory, at the arithmetic of float32.
#include "packed.h"
#include "problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

constexpr auto with_form = [](const LinearProblem&, const auto& body) {
  return has_pair_products() ? body.template operator()<float, Form::pairs>() : body.template operator()<float, Form::narrow>();
};

int64_t linear_gemm_bf16_workspace(const LinearProblem& p) { return product_workspace(p, with_form); }
int64_t linear_gemm_bf16_packed_bytes(const LinearProblem& p) { return product_packed_bytes(p, with_form); }
void linear_gemm_bf16_pack(const LinearProblem& p, const void* weight, void* packed) {
  product_pack(p, weight, packed, with_form);
}

template <class T>
void linear_gemm_bf16(const LinearProblem& p, const LinearOperands& m, Workspace& workspace) {
  if (p.rows > 0) with_form(p, [&]<class, Form form>() { PackedProduct<float, form>{p}.multiply(m, workspace); });
}

Cost linear_gemm_bf16_cost(const LinearProblem& p) { return product_cost(p, with_form); }

// The bound: two roundings of 2^-9 a product, and room for sums that cancel.
AI3_ALGORITHM(linear, gemm_bf16, .accuracy = Accuracy::approximate, .error_bound = 2e-2, .dtypes = dtype_bit(DType::f32),
              .epilogue = true, .workspace = linear_gemm_bf16_workspace, .cost = linear_gemm_bf16_cost,
              .packed_bytes = linear_gemm_bf16_packed_bytes, .pack = linear_gemm_bf16_pack, .sliced = true)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

// y = x * w^T as one packed matrix product (core/gemm.h). With few rows it is bound by the bandwidth at which the packed weight,
// one contiguous stream for each thread, comes from memory.
#include "packed.h"

namespace ai3::inline AI3_LEVEL {
namespace {

constexpr auto with_form = [](const LinearProblem& p, const auto& body) {
  return with_type(p.dtype, [&]<class T>() {
    if constexpr (dtype_of<T> == DType::bf16)
      if (has_pair_products()) return body.template operator()<T, Form::pairs>();
    return body.template operator()<T, Form::plain>();
  });
};

int64_t linear_gemm_workspace(const LinearProblem& p) { return product_workspace(p, with_form); }
int64_t linear_gemm_packed_bytes(const LinearProblem& p) { return product_packed_bytes(p, with_form); }
void linear_gemm_pack(const LinearProblem& p, const void* weight, void* packed) { product_pack(p, weight, packed, with_form); }

template <class T>
void linear_gemm(const LinearProblem& p, const Buffers& m, Workspace& workspace) {
  if (p.rows == 0) return;
  if constexpr (dtype_of<T> == DType::bf16)
    if (has_pair_products()) return PackedProduct<T, Form::pairs>{p}.multiply(m, workspace);
  PackedProduct<T, Form::plain>{p}.multiply(m, workspace);
}

Cost linear_gemm_cost(const LinearProblem& p) {
  const bool pairs = p.dtype == DType::bf16 && has_pair_products();
  const double m = static_cast<double>(p.rows), k = static_cast<double>(p.in_features), n = static_cast<double>(p.out_features);
  return {2 * m * k * n, static_cast<double>(size_of(p.dtype)) * (m * k + m * n) + (pairs ? 2 : 4) * k * n, pairs ? 1.6 : .95};
}

AI3_ALGORITHM(linear, gemm, .epilogue = true, .workspace = linear_gemm_workspace, .cost = linear_gemm_cost,
              .packed_bytes = linear_gemm_packed_bytes, .pack = linear_gemm_pack, .backward = Backward::own)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

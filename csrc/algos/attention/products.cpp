// The instances that products.h and visible.h declare.
#define AI3_DEFINES_ATTENTION_PRODUCTS
#include "products.h"

#include "visible.h"

namespace ai3::inline AI3_LEVEL {
AI3_ATTENTION_PRODUCTS_()
AI3_ATTENTION_MASKS_()
#if AI3_VECTOR_BYTES == 64
template bool all_finite<bfloat16>(const RowsAt<bfloat16>&, int64_t, int64_t);
void multiply_pair_rows(const bfloat16* rows, int64_t stride, int64_t count, const float* panel, int64_t columns, int64_t pairs,
                        float* to, bool add) {
  Output<float> out{to, kPanel<float>};
  out.add = add;
  gemm_block<float>(PairRows{rows, stride}, count, panel, pairs * kPanel<float>, columns, pairs, out);
}
#endif
}  // namespace ai3::inline AI3_LEVEL

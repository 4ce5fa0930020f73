// The instances that products.h and visible.h declare.
#define AI3_DEFINES_ATTENTION_PRODUCTS
#include "products.h"

#include "visible.h"

namespace ai3::inline AI3_LEVEL {
AI3_ATTENTION_PRODUCTS_()
AI3_ATTENTION_MASKS_()
}  // namespace ai3::inline AI3_LEVEL

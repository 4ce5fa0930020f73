// The type of a normalization's weight and bias.
#pragma once
#include "dtype.h"

namespace ai3::inline AI3_LEVEL {

// body.operator()<W>() for the type of weight and bias: float32 beside 16 bits where they are `wide`.
template <class T, class Body>
AI3_INLINE void with_weight_type(bool wide, const Body& body) {
  if constexpr (sizeof(T) == 2) {
    if (wide) return body.template operator()<float>();
  }
  body.template operator()<T>();
}

}  // namespace ai3::inline AI3_LEVEL

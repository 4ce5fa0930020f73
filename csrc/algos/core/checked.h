// Overflow-checked size arithmetic. Sizes come from users: a product that wraps must never become a small allocation.
#pragma once
#include <cstdint>
#include <initializer_list>

#include "dtype.h"

namespace ai3 {

// A size that could not be represented; saturates through further sums and products.
inline constexpr int64_t kOverflow = INT64_MAX;

AI3_INLINE int64_t checked_mul(int64_t a, int64_t b) {
  int64_t r;
  return a == kOverflow || b == kOverflow || __builtin_mul_overflow(a, b, &r) ? kOverflow : r;
}
AI3_INLINE int64_t checked_add(int64_t a, int64_t b) {
  int64_t r;
  return __builtin_add_overflow(a, b, &r) ? kOverflow : r;
}
AI3_INLINE int64_t checked_product(std::initializer_list<int64_t> factors) {
  int64_t r = 1;
  for (const int64_t* f = factors.begin(); f != factors.end(); f++) r = checked_mul(r, *f);
  return r;
}
AI3_INLINE int64_t greatest_common_divisor(int64_t a, int64_t b) {
  while (b != 0) {
    const int64_t rest = a % b;
    a = b, b = rest;
  }
  return a;
}
AI3_INLINE int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }
AI3_INLINE int64_t round_up(int64_t a, int64_t b) { return checked_mul(ceil_div(a, b), b); }

}  // namespace ai3

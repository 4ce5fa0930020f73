// What rules compare of algorithms' costs.
#pragma once
#include "algorithm.h"

namespace ai3::inline AI3_LEVEL {
namespace {

// The operations, or those that moving the bytes takes as long as, whichever are more.
AI3_INLINE double work(const Cost& cost) {
  constexpr double operations_per_byte = 8;
  const double memory = operations_per_byte * cost.bytes;
  return cost.flops > memory ? cost.flops : memory;
}

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

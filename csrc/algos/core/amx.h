// Whether there is Intel's AMX: tiles of bfloat16, whose registers the system gives only to processes that ask for them. In a
// header of its own, since most of what includes isa.h needs no system calls.
#pragma once
#include "isa.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace ai3::inline AI3_LEVEL {

// Whether processor and system have them, which is what oneDNN looks for.
inline bool processor_has_matrix_tiles() {
#if defined(__x86_64__) && defined(__linux__)
  static const bool has = [] {
    constexpr long kSupported = 0x1021, kTileData = 18;  // ARCH_GET_XCOMP_SUPP, XFEATURE_XTILEDATA
    constexpr unsigned kBfloat16 = 1u << 22, kTiles = 1u << 24;
    unsigned a = 0, b = 0, c = 0, d = 0;
    unsigned long features = 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & kBfloat16) && (d & kTiles) &&
           syscall(SYS_arch_prctl, kSupported, &features) == 0 && (features >> kTileData & 1);
  }();
  return has;
#else
  return false;
#endif
}

// Whether they are used: unless AI3_OPS_AMX is 0, or AI3_OPS_BF16, or the system refuses.
inline bool uses_matrix_tiles() {
#if defined(__x86_64__) && defined(__linux__)
  static const bool used = [] {
    constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
    return uses_bf16_instructions() && !is_switched_off("AI3_OPS_AMX") && processor_has_matrix_tiles() &&
           syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  }();
  return used;
#else
  return false;
#endif
}

}  // namespace ai3::inline AI3_LEVEL

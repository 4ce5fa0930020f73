// Which instruction-set level runs. For those who call kernels (glue, tests, benchmarks), not for kernels.
#pragma once
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "amx.h"
#include "machine.h"

extern "C" {
extern const ai3::MachineProbe __start_ai3_probes[];
extern const ai3::MachineProbe __stop_ai3_probes[];
}

namespace ai3 {

// The levels that this processor runs, best first.
inline std::vector<std::string> usable_levels() {
  std::vector<std::string> usable;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq"))
    usable.push_back("avx512");
  if (avx2) usable.push_back("avx2");
#endif
  usable.push_back("portable");
  return usable;
}

// The best usable level, or the lower one that the environment variable AI3_OPS_ISA names; throws std::runtime_error when it
// names one that is not usable.
inline const std::string& level() {
  static const std::string chosen = [] {
    const std::vector<std::string> usable = usable_levels();
    const char* wanted = std::getenv("AI3_OPS_ISA");
    if (!wanted || !*wanted) return usable.front();
    std::string message = std::string("ai3: AI3_OPS_ISA=") + wanted + " is not usable here; usable:";
    for (const std::string& u : usable) {
      if (u == wanted) return u;
      message += " " + u;
    }
    throw std::runtime_error(message);
  }();
  return chosen;
}

// Whether its kernels multiply pairs of bfloat16 (has_pair_products in micro_kernel.h), on which forms of packed weights depend.
inline bool level_has_pair_products() { return level() == "avx512" && uses_bf16_instructions(); }
// Whether they go through tiles (has_matrix_tiles in tiles.h).
inline bool level_has_matrix_tiles() { return level() == "avx512" && uses_matrix_tiles(); }

inline Machine measure_machine(int threads, bool again = false) {
  for (auto p = __start_ai3_probes; p != __stop_ai3_probes; p++)
    if (level() == p->level) return p->measure(threads, again);
  throw std::runtime_error("ai3: no kernels for level " + level());
}

}  // namespace ai3

// What this machine gives: the multiply-add peak and the read bandwidth, measured, so that figures can be a share of them.
#pragma once
#include "isa.h"

namespace ai3 {

struct Machine {
  double flops;  // float32, 2 per multiply-add, per second
  double bytes;  // read from memory, per second
};

// One record for each level in the section `ai3_probes`, for callers outside the level.
struct MachineProbe {
  const char* level;
  Machine (*measure)(int threads, bool again);
};

inline namespace AI3_LEVEL {
// Measured at the first call for a number of threads (under 50 ms), then remembered: what is measured `again` is not, so
// that nothing that was decided by it changes. Safe to call from many threads.
Machine machine(int threads, bool again = false);
}  // namespace AI3_LEVEL

}  // namespace ai3

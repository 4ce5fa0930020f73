// What this machine gives: the multiply-add peak and the read bandwidth, measured, so that figures can be a share of them.
#pragma once
#include "dtype.h"
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

// Operations per byte of a core whose vectors have `lanes` floats, for choices that noise in a measurement must not change: in
// steps of four around what such cores usually have (two 512-bit multiply-adds a cycle and 10 to 25 GB/s make 5 to 14, half as
// wide ones half of that). A machine's choices are then the same in every process unless its ratio is just twice or half the
// usual one; rounding to powers of two had an edge at 11.3, where AVX-512 cores lie.
AI3_INLINE double steady_balance(const Machine& m, int lanes) {
  const double usual = lanes / 2.0, steps = (m.flops / m.bytes) / usual;
  double balance = usual;
  for (double s = steps; s >= 2; s /= 4) balance *= 4;
  for (double s = steps; s < 0.5; s *= 4) balance /= 4;
  return balance;
}

inline namespace AI3_LEVEL {
// Measured at the first call for a number of threads (under 50 ms), then remembered: what is measured `again` is not, so
// that nothing that was decided by it changes. Safe to call from many threads.
Machine machine(int threads, bool again = false);
}  // namespace AI3_LEVEL

}  // namespace ai3

// The weight as KRSC, in which tensor cores read it beside channels_last images: in any other order cuDNN rearranges it in every
// call.
#pragma once
#include "../../algos/conv2d/problem.h"
#include "../core/device.cuh"

namespace ai3::inline AI3_LEVEL {

inline int64_t krsc_bytes(const Conv2dProblem& p) {
  return piece_bytes<char>(
      checked_product({p.out_channels, p.in_channels / p.groups, p.kernel_height, p.kernel_width, size_of(p.dtype)}));
}
template <class T>
void write_krsc(const Conv2dProblem& p, const T* from, T* to, const Workspace& workspace) {
  const int64_t channels = p.in_channels / p.groups, taps = p.kernel_height * p.kernel_width;
  for_each(p.out_channels * channels * taps, workspace, "KRSC weights", [=] __device__(int64_t i) {
    const int64_t c = i % channels, tap = i / channels % taps, k = i / channels / taps;
    to[i] = from[(k * channels + c) * taps + tap];
  });
}
inline void pack_krsc(const Conv2dProblem& p, const Operand& weight, const Operand& packed, Workspace& workspace) {
  with_type(p.dtype, [&]<class T>() { write_krsc(p, weight.read<T>(), packed.write<T>(), workspace); });
}

}  // namespace ai3::inline AI3_LEVEL

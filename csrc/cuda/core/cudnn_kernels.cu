// The kernels of cudnn.cuh, apart from what only the host's compiler needs to read.
#include "cudnn.cuh"
#include "device.cuh"

namespace ai3::inline AI3_LEVEL {
namespace {

template <class T>
void write_krsc(const Conv2dProblem& p, const T* from, T* to, const Workspace& workspace) {
  const int64_t channels = p.in_channels / p.groups, taps = p.kernel_height * p.kernel_width;
  for_each(p.out_channels * channels * taps, workspace, "KRSC weights", [=] __device__(int64_t i) {
    const int64_t c = i % channels, tap = i / channels % taps, k = i / channels / taps;
    to[i] = from[(k * channels + c) * taps + tap];
  });
}

}  // namespace

void cudnn_pack(const Conv2dProblem& p, const Operand& weight, const Operand& packed, Workspace& workspace) {
  with_type(p.dtype, [&]<class T>() { write_krsc(p, weight.read<T>(), packed.write<T>(), workspace); });
}
void cudnn_spread_bias(const Conv2dProblem& p, const Conv2dOperands& m, Workspace& workspace) {
  with_type(p.dtype, [&]<class T>() { spread_bias(p, m.bias.read<T>(), m.output.write<T>(), workspace, "cuDNN's bias"); });
}

}  // namespace ai3::inline AI3_LEVEL

// The kernels of cudnn.cuh, apart from what only the host's compiler needs to read.
#include "channels.cuh"
#include "cudnn.cuh"
#include "device.cuh"

namespace ai3::inline AI3_LEVEL {
namespace {

// Of each filter, `rows` x `columns` elements: the same with these exchanged.
template <class T>
void transpose_filters(int64_t filters, int64_t rows, int64_t columns, const T* from, T* to, const Workspace& workspace) {
  for_each(filters * rows * columns, workspace, "KRSC weights", [=] __device__(int64_t i) {
    const int64_t row = i % rows, column = i / rows % columns, filter = i / rows / columns;
    to[i] = from[(filter * rows + row) * columns + column];
  });
}
template <class T>
void sum_bias(const Shares& s, const T* gy, T* gb, Workspace& workspace) {
  using A = Acc<T>;
  A* const totals = take<A>(workspace, 2 * s.planes);
  sum_channels(s, totals, workspace, "the bias's gradient",
               [=] __device__(const Shares::Mine&, int64_t e, A(&sums)[2]) { sums[0] += load_acc(gy + e); });
  sum_images(s, totals, gb, static_cast<T*>(nullptr), workspace, "the bias's gradient");
}
Channels channels_of(const Conv2dProblem& p) {
  return {p.batch, p.out_channels, checked_mul(p.out_height, p.out_width), p.y_stride.c == 1};
}

}  // namespace

void cudnn_pack(const Conv2dProblem& p, const Operand& weight, const Operand& packed, Workspace& workspace) {
  const int64_t channels = p.in_channels / p.groups, taps = p.kernel_height * p.kernel_width;
  with_type(p.dtype, [&]<class T>() {
    transpose_filters(p.out_channels, channels, taps, weight.read<T>(), packed.write<T>(), workspace);
  });
}
void cudnn_unpack(const Conv2dProblem& p, const Operand& krsc, const Operand& weight, Workspace& workspace) {
  const int64_t channels = p.in_channels / p.groups, taps = p.kernel_height * p.kernel_width;
  with_type(p.dtype,
            [&]<class T>() { transpose_filters(p.out_channels, taps, channels, krsc.read<T>(), weight.write<T>(), workspace); });
}
void cudnn_spread_bias(const Conv2dProblem& p, const Conv2dOperands& m, Workspace& workspace) {
  with_type(p.dtype, [&]<class T>() { spread_bias(p, m.bias.read<T>(), m.output.write<T>(), workspace, "cuDNN's bias"); });
}

int64_t cudnn_sum_bias_bytes(const Conv2dProblem& p) {
  return with_type(p.dtype, [&]<class T>() {
    const Shares s(channels_of(p));
    return checked_add(piece_bytes<Acc<T>>(checked_mul(2, s.planes)), sum_channels_bytes<Acc<T>>(s));
  });
}
void cudnn_sum_bias(const Conv2dProblem& p, const Operand& grad_output, const Operand& grad_bias, Workspace& workspace) {
  with_type(p.dtype,
            [&]<class T>() { sum_bias(Shares(channels_of(p)), grad_output.read<T>(), grad_bias.write<T>(), workspace); });
}

}  // namespace ai3::inline AI3_LEVEL

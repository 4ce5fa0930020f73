// One pass: each channel is multiplied and shifted by numbers of its mean, variance, weight and bias.
#include "../../algos/batch_norm/problem.h"
#include "../core/channels.cuh"

namespace ai3::inline AI3_LEVEL {
namespace {

bool batch_norm_supports(const BatchNormProblem& p, Reason& reason) {
  return has_statistics(p, reason) && device_supports(p, reason);
}

// Of a channel.
template <class A, class W>
struct Numbers {
  const W *means, *variances, *weights;
  A eps;
  __device__ __forceinline__ A mean(int64_t channel) const { return static_cast<A>(load_acc(means + channel)); }
  __device__ __forceinline__ A scale(int64_t channel) const {
    return A(1) / static_cast<A>(sqrt(static_cast<A>(load_acc(variances + channel)) + eps));
  }
  __device__ __forceinline__ A factor(int64_t channel) const {
    return scale(channel) * (weights ? static_cast<A>(load_acc(weights + channel)) : A(1));
  }
};
template <class T, class W, class Operands>
Numbers<Acc<T>, W> numbers_of(const BatchNormProblem& p, const Operands& m) {
  return {m.mean.template read<W>(), m.variance.template read<W>(), m.weight.template read<W>(), static_cast<Acc<T>>(p.eps)};
}

template <class T, class W>
void normalize(const BatchNormProblem& p, const BatchNormOperands& m, const Workspace& workspace) {
  using A = Acc<T>;
  const Shares s(p.of);
  const Numbers<A, W> numbers = numbers_of<T, W>(p, m);
  const T* const x = m.input.read<T>();
  const W* const b = m.bias.read<W>();
  T* const y = m.output.write<T>();
  for_each(s.threads(), workspace, "batch_norm_direct", [=] __device__(int64_t i) {
    const Shares::Mine mine = s.of_thread(i);
    const A mean = numbers.mean(mine.channel), factor = numbers.factor(mine.channel),
            shift = b ? static_cast<A>(load_acc(b + mine.channel)) : A(0);
    for (int64_t e = mine.begin; e < mine.end; e += mine.step) store_acc(y + e, (load_acc(x + e) - mean) * factor + shift);
  });
}
template <class T>
void batch_norm_direct(const BatchNormProblem& p, const BatchNormOperands& m, Workspace& workspace) {
  with_weight_type<T>(p.wide_weight, [&]<class W>() { normalize<T, W>(p, m, workspace); });
}

// Gradients ----------------------------------------------------------------------------------------------------------------
int64_t backward_workspace(const BatchNormProblem& p, const BatchNormGradients& m) {
  if (!m.grad_weight && !m.grad_bias) return 0;
  return with_type(p.dtype, [&]<class T>() {
    const Shares s(p.of);
    return checked_add(piece_bytes<Acc<T>>(checked_mul(2, s.planes)), sum_channels_bytes<Acc<T>>(s));
  });
}
// dX = dY * factor; dweight and dbias are the sums of dY * (x - mean) * scale and of dY.
template <class T, class W>
void backward_of(const BatchNormProblem& p, const BatchNormGradients& m, Workspace& workspace) {
  using A = Acc<T>;
  const Shares s(p.of);
  const Numbers<A, W> numbers = numbers_of<T, W>(p, m);
  const T *const x = m.input.read<T>(), *const gy = m.grad_output.read<T>();
  if (T* const gx = m.grad_input.write<T>())
    for_each(s.threads(), workspace, "batch_norm's gradient", [=] __device__(int64_t i) {
      const Shares::Mine mine = s.of_thread(i);
      const A factor = numbers.factor(mine.channel);
      for (int64_t e = mine.begin; e < mine.end; e += mine.step) store_acc(gx + e, load_acc(gy + e) * factor);
    });
  if (!m.grad_weight && !m.grad_bias) return;
  A* const totals = take<A>(workspace, 2 * s.planes);
  sum_channels(s, totals, workspace, "batch_norm's sums", [=] __device__(const Shares::Mine& mine, int64_t e, A(&sums)[2]) {
    const A g = load_acc(gy + e);
    sums[0] += g, sums[1] += g * ((load_acc(x + e) - numbers.mean(mine.channel)) * numbers.scale(mine.channel));
  });
  sum_images(s, totals, m.grad_bias.write<W>(), m.grad_weight.write<W>(), workspace, "batch_norm's sums");
}
void backward(const BatchNormProblem& p, const BatchNormGradients& m, Workspace& workspace) {
  with_type(p.dtype,
            [&]<class T>() { with_weight_type<T>(p.wide_weight, [&]<class W>() { backward_of<T, W>(p, m, workspace); }); });
}
GradientNames gradients(const BatchNormProblem&) { return {"direct", "direct"}; }

AI3_ALGORITHM(batch_norm, direct, .accuracy = Accuracy::bounded, .error_bound = 4e-6, .supports = batch_norm_supports,
              .gradients = gradients, .backward = backward, .backward_workspace = backward_workspace)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

// One pass: each channel is multiplied and shifted by numbers that are made of its mean, variance, weight and bias first.
#include "../core/channels.h"
#include "problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

int64_t numbers_bytes(const BatchNormProblem& p, DType dtype) {
  return with_type(dtype, [&]<class T>() { return checked_mul(5, workspace_bytes<Acc<T>>(p.of.channels)); });
}
// Of each channel: y = (x * unit + minus) * factor + shift, where factor is scale * weight.
template <class A>
struct ChannelNumbers {
  A *unit, *minus, *factor, *shift, *scale;
  template <class W>
  ChannelNumbers(const BatchNormProblem& p, const W* mean, const W* variance, const W* w, const W* b, Workspace& workspace) {
    for (A** numbers : {&unit, &minus, &factor, &shift, &scale}) *numbers = workspace.take<A>(p.of.channels);
    for (int64_t c = 0; c < p.of.channels; c++) {
      const double deviation = __builtin_sqrt(static_cast<double>(widen(variance[c])) + p.eps);
      unit[c] = 1, minus[c] = -static_cast<A>(widen(mean[c])), scale[c] = static_cast<A>(1 / deviation);
      factor[c] = static_cast<A>((w ? static_cast<double>(widen(w[c])) : 1) / deviation);
      shift[c] = b ? static_cast<A>(widen(b[c])) : A(0);
    }
  }
  Normal<A> normal() const { return {{unit, false}, {minus, false}, {factor, false}, {shift, false}}; }
};

int64_t batch_norm_workspace(const BatchNormProblem& p) { return numbers_bytes(p, p.dtype); }
template <class T>
void batch_norm_direct(const BatchNormProblem& p, const BatchNormOperands& m, Workspace& workspace) {
  with_weight_type<T>(p.wide_weight, [&]<class W>() {
    const ChannelNumbers<Acc<T>> numbers(p, m.mean.read<W>(), m.variance.read<W>(), m.weight.read<W>(), m.bias.read<W>(),
                                         workspace);
    numbers.normal().apply(p.threads, p.of, m.input.read<T>(), m.output.write<T>());
  });
}

// Gradients ----------------------------------------------------------------------------------------------------------------
int64_t backward_workspace(const BatchNormProblem& p, const BatchNormGradients& m) {
  if (!m.grad_weight && !m.grad_bias) return numbers_bytes(p, p.dtype);
  return with_type(p.dtype, [&]<class T>() {
    const int64_t sums = workspace_bytes<double>(checked_product({2, p.of.batch, p.of.channels}));
    return checked_add(checked_add(numbers_bytes(p, p.dtype), sums), sum_channels_bytes<Acc<T>>(p.of, 2));
  });
}
// dX = dY * factor; dweight and dbias are the sums of dY * (x - mean) * scale and of dY.
template <class T, class W>
void backward_of(const BatchNormProblem& p, const BatchNormGradients& m, Workspace& workspace) {
  using A = Acc<T>;
  using V = Vec<A>;
  const Channels& c = p.of;
  const T *const x = m.input.read<T>(), *const gy = m.grad_output.read<T>();
  const ChannelNumbers<A> numbers(p, m.mean.read<W>(), m.variance.read<W>(), m.weight.read<W>(), static_cast<const W*>(nullptr),
                                  workspace);
  if (T* const gx = m.grad_input.write<T>())
    each_of_channels<A>(p.threads, c, [&](int64_t e, int64_t count, int64_t, const OfElements<A>& of) {
      store_some(gx + e, load_some(gy + e, count) * of(numbers.factor), count);
    });
  W *const gw = m.grad_weight.write<W>(), *const gb = m.grad_bias.write<W>();
  if (!gw && !gb) return;
  const int64_t all = c.batch * c.channels;
  double* const sums = workspace.take<double>(2 * all);
  const Normal<A> normal = numbers.normal();
  sum_channels<2, A>(p.threads, c, sums, workspace, [&](V* s, int64_t e, int64_t count, int64_t n, const OfElements<A>& of) {
    const V g = load_some(gy + e, count);  // 0 beyond the plane
    s[0] += g, s[1] = fma(g, normal.centered(c, load_some(x + e, count), n, of), s[1]);
  });
  for (int64_t channel = 0; channel < c.channels; channel++) {
    double of_bias = 0, of_weight = 0;
    for (int64_t i = channel; i < all; i += c.channels) of_bias += sums[i], of_weight += sums[all + i];
    if (gw) gw[channel] = narrowed<W>(static_cast<Acc<W>>(of_weight * static_cast<double>(numbers.scale[channel])));
    if (gb) gb[channel] = narrowed<W>(static_cast<Acc<W>>(of_bias));
  }
}
void backward(const BatchNormProblem& p, const BatchNormGradients& m, Workspace& workspace) {
  with_type(p.dtype,
            [&]<class T>() { with_weight_type<T>(p.wide_weight, [&]<class W>() { backward_of<T, W>(p, m, workspace); }); });
}
GradientNames gradients(const BatchNormProblem&) { return {"direct", "direct"}; }

AI3_ALGORITHM(batch_norm, direct, .accuracy = Accuracy::bounded, .error_bound = 4e-6, .supports = has_statistics,
              .workspace = batch_norm_workspace, .gradients = gradients, .backward = backward,
              .backward_workspace = backward_workspace)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

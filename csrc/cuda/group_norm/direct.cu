// Moments of a group from those of its channels' shares (Chan, Golub & LeVeque 1983), then what is written. A share's are around
// its own mean, a group's around the mean of those: no guess of it can be far off.
#include "../../algos/group_norm/problem.h"
#include "../core/channels.cuh"

namespace ai3::inline AI3_LEVEL {
namespace {

struct Groups : Shares {
  int64_t groups, each, all;  // of an image; channels of a group; of all images
  explicit Groups(const GroupNormProblem& p)
      : Shares(p.of),
        groups(p.groups),
        each(p.of.channels / (p.groups > 0 ? p.groups : 1)),
        all(checked_mul(p.of.batch, p.groups)) {}
  __device__ __forceinline__ int64_t group(const Mine& mine) const {
    return mine.image * groups + divided(mine.channel, each).quotient;
  }
  __device__ __forceinline__ int64_t first_channel(int64_t group) const { return group % groups * each; }
  // The i-th element of a group, in any order.
  __device__ __forceinline__ int64_t element(int64_t group, int64_t i) const {
    const int64_t image = group / groups * of.channels * of.pixels;
    if (!of.last) return image + first_channel(group) * of.pixels + i;
    const Quotient at = divided(i, each);
    return image + at.quotient * of.channels + first_channel(group) + at.rest;
  }
  // The i-th of a group's shares: share by share, the channels of each side by side.
  struct Part {
    int64_t share, channel, plane;
  };
  __device__ __forceinline__ Part part(int64_t group, int64_t i) const {
    const Quotient at = divided(i, each);
    const int64_t channel = first_channel(group) + at.rest;
    return {at.quotient, channel, plane(group / groups, channel)};
  }
};

// Of a share: its mean, a sum of two numbers, and the sum of the squares of the differences from it.
template <class A>
struct ShiftedSums {
  A guess, rest, squares;
};
template <class T>
__global__ void __launch_bounds__(kThreads)
    moments_of_groups(Groups g, double eps, const T* x, const ShiftedSums<Acc<T>>* shares, Moments<Acc<T>>* moments) {
  using A = Acc<T>;
  A* const memory = shared<A>();
  const int64_t parts = g.each * g.count, elements = g.each * g.of.pixels;
  const A n = static_cast<A>(elements);
  for (int64_t group = blockIdx.x; group < g.all; group += gridDim.x) {
    auto each_part = [&](const auto& look) {
      for (int64_t i = threadIdx.x; i < parts; i += kThreads) {
        const Groups::Part part = g.part(group, i);
        look(static_cast<A>(g.pixels_in(part.share)), shares[part.share * g.planes + part.plane]);
      }
    };
    A sum = 0, around[2] = {0, 0};
    each_part([&](A pixels, const ShiftedSums<A>& of) { sum += pixels * (of.guess + of.rest); });
    const A guess = reduce<kThreads>(sum, memory, Sum()) / n;
    each_part([&](A pixels, const ShiftedSums<A>& of) {
      const A d = (of.guess - guess) + of.rest;
      around[0] += pixels * d, around[1] += of.squares + pixels * (d * d);
    });
    reduce_each<kThreads>(around, memory, Sum());
    Moments<A> of;
    if (!moments_around(A(1), guess, around[0] / n, around[1] / n, static_cast<A>(eps), of))
      of = moments_of_extremes<kThreads, true>(
          elements, [=](int64_t i) { return load_acc(x + g.element(group, i)); }, eps, memory);
    if (threadIdx.x == 0) moments[group] = of;
  }
}

template <class A>
int64_t moments_bytes(const Groups& g) {
  return checked_add(piece_bytes<Moments<A>>(g.all), piece_bytes<ShiftedSums<A>>(checked_mul(g.count, g.planes)));
}
template <class T>
const Moments<Acc<T>>* find_moments(const GroupNormProblem& p, const T* x, Workspace& workspace) {
  using A = Acc<T>;
  const Groups g(p);
  Moments<A>* const moments = take<Moments<A>>(workspace, g.all);
  ShiftedSums<A>* const shares = take<ShiftedSums<A>>(workspace, g.count * g.planes);
  for_each(g.threads(), workspace, "group_norm's moments", [=] __device__(int64_t i) {
    const Shares::Mine mine = g.of_thread(i);
    const A n = static_cast<A>(g.pixels_in(mine.share));
    A sum = 0, off = 0, squares = 0;
    for (int64_t e = mine.begin; e < mine.end; e += mine.step) sum += load_acc(x + e);
    const A guess = g.sum(sum) / n;
    for (int64_t e = mine.begin; e < mine.end; e += mine.step) {
      const A d = load_acc(x + e) - guess;
      off += d, squares += d * d;
    }
    off = g.sum(off), squares = g.sum(squares);
    if (mine.first)
      shares[mine.share * g.planes + g.plane(mine.image, mine.channel)] = {guess, off / n, squares - off * (off / n)};
  });
  launch(moments_of_groups<T>, {blocks_for(g.all)}, kThreads, 2 * reduce_bytes<A>(kThreads), workspace, "group_norm's moments", g,
         p.eps, x, shares, moments);
  return moments;
}

template <class T, class W>
void normalize(const GroupNormProblem& p, const ChannelOperands& m, Workspace& workspace) {
  using A = Acc<T>;
  const Groups g(p);
  const T* const x = m.input.read<T>();
  const W *const w = m.weight.read<W>(), *const b = m.bias.read<W>();
  T* const y = m.output.write<T>();
  const Moments<A>* const moments = find_moments(p, x, workspace);
  for_each(g.threads(), workspace, "group_norm_direct", [=] __device__(int64_t i) {
    const Shares::Mine mine = g.of_thread(i);
    const Moments<A> of = moments[g.group(mine)];
    const A factor = of.scale * (w ? static_cast<A>(load_acc(w + mine.channel)) : A(1)),
            shift = b ? static_cast<A>(load_acc(b + mine.channel)) : A(0);
    for (int64_t e = mine.begin; e < mine.end; e += mine.step) store_acc(y + e, of.centered(load_acc(x + e)) * factor + shift);
  });
}
int64_t group_norm_workspace(const GroupNormProblem& p) {
  return with_type(p.dtype, [&]<class T>() { return moments_bytes<Acc<T>>(Groups(p)); });
}
template <class T>
void group_norm_direct(const GroupNormProblem& p, const ChannelOperands& m, Workspace& workspace) {
  with_weight_type<T>(p.wide_weight, [&]<class W>() { normalize<T, W>(p, m, workspace); });
}

// Gradients ----------------------------------------------------------------------------------------------------------------
// With g = dY * weight and h the normalized values: the means of g and of g * h over each group, of sums of dY and dY * h over
// each channel of an image.
template <class A, class W>
__global__ void __launch_bounds__(kThreads) means_of_groups(Groups g, const A* totals, const W* w, A* means) {
  A* const memory = shared<A>();
  const A n = static_cast<A>(g.each * g.of.pixels);
  for (int64_t group = blockIdx.x; group < g.all; group += gridDim.x) {
    A sums[2] = {0, 0};
    for (int64_t i = threadIdx.x; i < g.each; i += kThreads) {
      const Groups::Part of = g.part(group, i);
      const A weight = w ? static_cast<A>(load_acc(w + of.channel)) : A(1);
      sums[0] += weight * totals[of.plane], sums[1] += weight * totals[g.planes + of.plane];
    }
    reduce_each<kThreads>(sums, memory, Sum());
    if (threadIdx.x == 0) means[2 * group] = sums[0] / n, means[2 * group + 1] = sums[1] / n;
  }
}

int64_t backward_workspace(const GroupNormProblem& p, const WeightedGradients& m) {
  return with_type(p.dtype, [&]<class T>() {
    using A = Acc<T>;
    const Groups g(p);
    const int64_t sums = checked_add(piece_bytes<A>(checked_mul(2, g.planes)), sum_channels_bytes<A>(g));
    return checked_add(checked_add(moments_bytes<A>(g), sums), m.grad_input ? piece_bytes<A>(checked_mul(2, g.all)) : 0);
  });
}
// dX = scale * (g - mean(g) - h * mean(g * h)); dweight and dbias are the sums of dY * h and of dY.
template <class T, class W>
void backward_of(const GroupNormProblem& p, const WeightedGradients& m, Workspace& workspace) {
  using A = Acc<T>;
  const Groups g(p);
  const T *const x = m.input.read<T>(), *const gy = m.grad_output.read<T>();
  const W* const w = m.weight.read<W>();
  const Moments<A>* const moments = find_moments(p, x, workspace);
  A* const totals = take<A>(workspace, 2 * g.planes);
  sum_channels(g, totals, workspace, "group_norm's sums", [=] __device__(const Shares::Mine& mine, int64_t e, A(&sums)[2]) {
    const A d = load_acc(gy + e);
    sums[0] += d, sums[1] += d * moments[g.group(mine)].normal(load_acc(x + e));
  });
  if (T* const gx = m.grad_input.write<T>()) {
    A* const means = take<A>(workspace, 2 * g.all);
    launch(means_of_groups<A, W>, {blocks_for(g.all)}, kThreads, 2 * reduce_bytes<A>(kThreads), workspace, "group_norm's sums", g,
           totals, w, means);
    for_each(g.threads(), workspace, "group_norm's gradient", [=] __device__(int64_t i) {
      const Shares::Mine mine = g.of_thread(i);
      const int64_t group = g.group(mine);
      const Moments<A> of = moments[group];
      const A weight = w ? static_cast<A>(load_acc(w + mine.channel)) : A(1), first = means[2 * group],
              second = means[2 * group + 1];
      for (int64_t e = mine.begin; e < mine.end; e += mine.step)
        store_acc(gx + e, of.scale_of_x * (load_acc(gy + e) * weight - first - of.normal(load_acc(x + e)) * second));
    });
  }
  if (m.grad_weight || m.grad_bias)
    sum_images(g, totals, m.grad_bias.write<W>(), m.grad_weight.write<W>(), workspace, "group_norm's sums");
}
void backward(const GroupNormProblem& p, const WeightedGradients& m, Workspace& workspace) {
  with_type(p.dtype,
            [&]<class T>() { with_weight_type<T>(p.wide_weight, [&]<class W>() { backward_of<T, W>(p, m, workspace); }); });
}
GradientNames gradients(const GroupNormProblem&) { return {"direct", "direct"}; }

AI3_ALGORITHM(group_norm, direct, .accuracy = Accuracy::bounded, .error_bound = 4e-6,
              .supports = device_supports<GroupNormProblem>, .workspace = group_norm_workspace, .gradients = gradients,
              .backward = backward, .backward_workspace = backward_workspace)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

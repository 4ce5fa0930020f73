// Groups of planes are runs of memory, of which each thread takes some: the sums of one around a guess of its mean, its moments
// (moments.h), then its output, from the cache. Pixel by pixel, and where groups are fewer than threads, a few images at a time:
// sums of each channel first. The guess is a group's first element; where it was too far from the mean for the sums of squares,
// the mean itself is the guess of a second try.
#include "../core/channels.h"
#include "problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

constexpr int64_t kBytesAtATime = 1 << 20;
constexpr double kFar = 64;  // squared distance of the guess from the mean, in variances: of 24 bits six are lost

struct GroupsOf {
  Channels at_a_time;
  int64_t each, elements;  // channels and elements of a group
  explicit GroupsOf(const GroupNormProblem& p)
      : at_a_time(p.of), each(p.of.channels / larger(1, p.groups)), elements(each * p.of.pixels) {
    const int64_t bytes = larger(1, p.of.channels * p.of.pixels * size_of(p.dtype));
    at_a_time.batch = smaller(p.of.batch, larger(1, kBytesAtATime / bytes));
  }
};

// Whether a thread takes whole groups: of planes, many or small ones. Not by the number of threads, which changes no sums.
constexpr int64_t kManyGroups = 8, kSmallGroup = 1 << 15;
AI3_INLINE bool by_group(const GroupNormProblem& p) {
  return !p.of.last && (p.of.batch * p.groups >= kManyGroups || GroupsOf(p).elements <= kSmallGroup);
}
AI3_INLINE bool is_far(double off, double squares) { return off * off > kFar * (squares - off * off); }
template <class A>
AI3_INLINE A first_guess(A first) {
  return first - first == 0 ? first : A(0);
}

// Of a group whose squares could not be summed, in a unit of its own and in float64. `channel` and `pixel`: from one to the next.
template <class T>
[[gnu::noinline]] Moments<Acc<T>> of_extremes(const GroupNormProblem& p, const T* first, int64_t channel, int64_t pixel) {
  using A = Acc<T>;
  const int64_t each = p.of.channels / p.groups;
  auto each_value = [&](const auto& look) {
    for (int64_t j = 0; j < each; j++)
      for (int64_t e = 0; e < p.of.pixels; e++) look(widen(first[j * channel + e * pixel]));
  };
  const A unit = unit_of<A>(each_value);
  const double elements = static_cast<double>(each * p.of.pixels), u = static_cast<double>(unit);
  double sum = 0, around[2] = {0, 0};
  each_value([&](A v) { sum += static_cast<double>(v) * u; });
  const A guess = static_cast<A>(sum / elements);
  each_value([&](A v) {
    const double d = static_cast<double>(v) * u - static_cast<double>(guess);
    around[0] += d, around[1] += d * d;
  });
  return bounded(moments_around(unit, guess, around[0] / elements, around[1] / elements, p.eps), p.eps);
}
// Of a run of memory.
template <class T>
AI3_INLINE Moments<Acc<T>> of_run(const GroupNormProblem& p, const T* x, int64_t elements) {
  using A = Acc<T>;
  A guess = first_guess(static_cast<A>(widen(*x)));
  for (bool tried = false;; tried = true) {
    double around[2];
    sum_row<2, A>(elements, around, [&](Vec<A>* s, int64_t i, int64_t count) {
      Vec<A> d = load_some(x + i, count) - Vec<A>(guess);
      for (int64_t j = count; j < Vec<A>::width; j++) d.raw[j] = 0;  // what is beyond must not count
      s[0] += d, s[1] = fma(d, d, s[1]);
    });
    const double off = around[0] / static_cast<double>(elements), squares = around[1] / static_cast<double>(elements);
    const Moments<A> m = moments_around(A(1), guess, off, squares, p.eps);
    if (!tried && is_far(off, squares))
      guess = m.guess + m.rest;
    else
      return m.exact ? m : of_extremes(p, x, p.of.pixels, 1);
  }
}

// Of the images that are computed at a time.
template <class A>
int64_t group_moments_bytes(const GroupNormProblem& p) {
  const Channels c = GroupsOf(p).at_a_time;
  const int64_t all = checked_mul(c.batch, c.channels);
  int64_t bytes = checked_add(workspace_bytes<double>(checked_mul(2, all)), sum_channels_bytes<A>(c, 2));
  bytes = checked_add(bytes, workspace_bytes<Moments<A>>(checked_mul(c.batch, p.groups)));
  return checked_add(bytes, checked_mul(2, workspace_bytes<A>(all)));
}

// The moments of each group, and as Normal's numbers for each channel.
template <class A>
struct GroupMoments {
  double* sums;
  Moments<A>* groups;
  A *unit, *minus;

  GroupMoments(const GroupNormProblem& p, Workspace& workspace) {
    const Channels c = GroupsOf(p).at_a_time;
    const int64_t all = c.batch * c.channels;
    sums = workspace.take<double>(2 * all), groups = workspace.take<Moments<A>>(c.batch * p.groups);
    unit = workspace.take<A>(all), minus = workspace.take<A>(all);
  }

  // Of `c.batch` images from x on. What Normal takes from a value is the guess: the rest of the mean is its user's to subtract.
  template <class T>
  void find(const GroupNormProblem& p, const Channels& c, const T* x, Workspace workspace) const {
    const int64_t all = c.batch * c.channels, each = c.channels / p.groups;
    const double elements = static_cast<double>(each * c.pixels);
    for (int64_t i = 0; i < c.batch * p.groups; i++) {
      groups[i] = {A(1), first_guess(static_cast<A>(widen(*first_of(p, c, x, i)))), A(0), A(1), A(1), true};
    }
    for (bool again = true, tried = false; again; tried = true) {
      for (int64_t i = 0; tried && i < c.batch * p.groups; i++) groups[i].guess += groups[i].rest;
      spread(p, c);
      const Normal<A> guess{{unit, true}, {minus, true}, {}, {}};
      Workspace own = workspace;
      sum_channels<2, A>(p.threads, c, sums, own, [&](Vec<A>* s, int64_t e, int64_t count, int64_t n, const OfElements<A>& of) {
        Vec<A> d = guess.centered(c, load_some(x + e, count), n, of);
        if (count < Vec<A>::width && !of.neighbours)  // what is beyond the plane must not count
          for (int64_t j = count; j < Vec<A>::width; j++) d.raw[j] = 0;
        s[0] += d, s[1] = fma(d, d, s[1]);
      });
      again = false;
      for (int64_t i = 0; i < c.batch * p.groups; i++) {
        double off = 0, squares = 0;
        for (int64_t j = i * each; j < (i + 1) * each; j++) off += sums[j], squares += sums[all + j];
        off /= elements, squares /= elements;
        again |= !tried && is_far(off, squares);
        groups[i] = moments_around(A(1), groups[i].guess, off, squares, p.eps);
      }
    }
    for (int64_t i = 0; i < c.batch * p.groups; i++)
      if (!groups[i].exact) groups[i] = of_extremes(p, first_of(p, c, x, i), c.last ? 1 : c.pixels, c.last ? c.channels : 1);
    spread(p, c);
  }

 private:
  template <class T>
  static const T* first_of(const GroupNormProblem& p, const Channels& c, const T* x, int64_t group) {
    return x + group / p.groups * c.channels * c.pixels + group % p.groups * (c.channels / p.groups) * (c.last ? 1 : c.pixels);
  }
  void spread(const GroupNormProblem& p, const Channels& c) const {
    const int64_t each = c.channels / p.groups;
    for (int64_t i = 0; i < c.batch * p.groups; i++)
      for (int64_t j = i * each; j < (i + 1) * each; j++) unit[j] = groups[i].unit, minus[j] = -groups[i].guess;
  }
};

int64_t group_norm_workspace(const GroupNormProblem& p) {
  if (by_group(p)) return 0;
  return with_type(p.dtype, [&]<class T>() {
    const Channels c = GroupsOf(p).at_a_time;
    return checked_add(group_moments_bytes<Acc<T>>(p), checked_mul(2, workspace_bytes<Acc<T>>(checked_mul(c.batch, c.channels))));
  });
}

template <class T, class W>
void normalize_groups(const GroupNormProblem& p, const T* x, const W* w, const W* b, T* y) {
  using A = Acc<T>;
  const int64_t each = p.of.channels / p.groups, pixels = p.of.pixels, elements = each * pixels;
  const int64_t grain = larger(1, kElementsOfShare / larger(1, elements));
  parallel_ranges(p.threads, p.of.batch * p.groups, grain, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; i++) {
      const Moments<A> of = of_run(p, x + i * elements, elements);
      for (int64_t j = 0; j < each; j++) {
        const int64_t channel = i % p.groups * each + j, at = i * elements + j * pixels;
        const Vec<A> factor(of.scale * (w ? static_cast<A>(widen(w[channel])) : A(1))),
            shift(b ? static_cast<A>(widen(b[channel])) : A(0));
        each_vector<A>(pixels, [&](int64_t e, int64_t count) {
          store_some(y + at + e, fma(of.centered(load_some(x + at + e, count)), factor, shift), count);
        });
      }
    }
  });
}
template <class T>
void group_norm_direct(const GroupNormProblem& p, const ChannelOperands& m, Workspace& workspace) {
  using A = Acc<T>;
  if (by_group(p))
    return with_weight_type<T>(p.wide_weight, [&]<class W>() {
      normalize_groups(p, m.input.read<T>(), m.weight.read<W>(), m.bias.read<W>(), m.output.write<T>());
    });
  const GroupsOf groups(p);
  const GroupMoments<A> moments(p, workspace);
  const int64_t all = groups.at_a_time.batch * p.of.channels, image = p.of.channels * p.of.pixels;
  A *const factor = workspace.take<A>(all), *const shift = workspace.take<A>(all);
  with_weight_type<T>(p.wide_weight, [&]<class W>() {
    const W *const w = m.weight.read<W>(), *const b = m.bias.read<W>();
    for (int64_t n = 0; n < p.of.batch; n += groups.at_a_time.batch) {
      Channels c = groups.at_a_time;
      c.batch = smaller(c.batch, p.of.batch - n);
      const T* const x = m.input.read<T>() + n * image;
      moments.find(p, c, x, workspace);
      for (int64_t i = 0; i < c.batch * c.channels; i++) {
        const int64_t channel = i % c.channels;
        const Moments<A>& of = moments.groups[i / groups.each];
        factor[i] = of.scale * (w ? static_cast<A>(widen(w[channel])) : A(1));
        shift[i] = (b ? static_cast<A>(widen(b[channel])) : A(0)) - of.rest * factor[i];
      }
      const Normal<A> normal{{moments.unit, true}, {moments.minus, true}, {factor, true}, {shift, true}};
      normal.apply(p.threads, c, x, m.output.write<T>() + n * image);
    }
  });
}

// Gradients ----------------------------------------------------------------------------------------------------------------
int64_t backward_workspace(const GroupNormProblem& p, const WeightedGradients&) {
  return with_type(p.dtype, [&]<class T>() {
    const Channels c = GroupsOf(p).at_a_time;
    const int64_t all = checked_mul(c.batch, c.channels);
    int64_t bytes = checked_add(group_moments_bytes<Acc<T>>(p), workspace_bytes<double>(checked_mul(2, all)));
    bytes = checked_add(bytes, workspace_bytes<double>(checked_mul(2, c.channels)));
    return checked_add(bytes, checked_mul(3, workspace_bytes<Acc<T>>(all)));
  });
}

// With g = dY * weight and h the normalized values: dX = scale * (g - mean(g) - h * mean(g * h)), the means of a group; dweight
// and dbias are the sums of dY * h and dY.
template <class T, class W>
void backward_of(const GroupNormProblem& p, const WeightedGradients& m, Workspace& workspace) {
  using A = Acc<T>;
  using V = Vec<A>;
  const GroupsOf groups(p);
  const GroupMoments<A> moments(p, workspace);
  const int64_t channels = p.of.channels, most = groups.at_a_time.batch * channels, image = channels * p.of.pixels;
  double *const sums = workspace.take<double>(2 * most), *const of_weight = workspace.take<double>(2 * channels),
                *const of_bias = of_weight + channels;
  A *const factor = workspace.take<A>(most), *const shift = workspace.take<A>(most), *const by_normal = workspace.take<A>(most);
  const W* const w = m.weight.read<W>();
  for (int64_t i = 0; i < 2 * channels; i++) of_weight[i] = 0;
  for (int64_t n = 0; n < p.of.batch; n += groups.at_a_time.batch) {
    Channels c = groups.at_a_time;
    c.batch = smaller(c.batch, p.of.batch - n);
    const int64_t all = c.batch * channels;
    const T *const x = m.input.read<T>() + n * image, *const gy = m.grad_output.read<T>() + n * image;
    moments.find(p, c, x, workspace);
    const Normal<A> normal{{moments.unit, true}, {moments.minus, true}, {factor, true}, {shift, true}};
    Workspace own = workspace;
    sum_channels<2, A>(p.threads, c, sums, own, [&](V* s, int64_t e, int64_t count, int64_t image_of, const OfElements<A>& of) {
      const V g = load_some(gy + e, count);  // 0 beyond the plane
      s[0] += g, s[1] = fma(g, normal.centered(c, load_some(x + e, count), image_of, of), s[1]);
    });
    for (int64_t i = 0; i < c.batch * p.groups; i++) {
      const Moments<A> of = moments.groups[i];
      const double scale = static_cast<double>(of.scale), elements = static_cast<double>(groups.elements);
      double mean = 0, with_normal = 0;
      for (int64_t j = i * groups.each; j < (i + 1) * groups.each; j++) {
        const double weight = w ? static_cast<double>(widen(w[j % channels])) : 1;
        const double centered = sums[all + j] - static_cast<double>(of.rest) * sums[j];  // of dY times x less its mean
        mean += weight * sums[j], with_normal += weight * scale * centered;
        of_weight[j % channels] += scale * centered, of_bias[j % channels] += sums[j];
        factor[j] = static_cast<A>(static_cast<double>(of.scale_of_x) * weight);
      }
      for (int64_t j = i * groups.each; j < (i + 1) * groups.each; j++) {
        const double by = -static_cast<double>(of.scale_of_x) * scale * with_normal / elements;
        by_normal[j] = static_cast<A>(by);
        shift[j] = static_cast<A>(-static_cast<double>(of.scale_of_x) * mean / elements - by * static_cast<double>(of.rest));
      }
    }
    if (T* const gx = m.grad_input.write<T>())
      each_of_channels<A>(p.threads, c, [&](int64_t e, int64_t count, int64_t image_of, const OfElements<A>& of) {
        auto numbers = [&](const A* all_images) { return of(all_images + image_of * channels); };
        const V h = normal.centered(c, load_some(x + e, count), image_of, of);
        const V g = fma(load_some(gy + e, count), numbers(factor), fma(h, numbers(by_normal), numbers(shift)));
        store_some(gx + n * image + e, g, count);
      });
  }
  W *const gw = m.grad_weight.write<W>(), *const gb = m.grad_bias.write<W>();
  for (int64_t i = 0; i < channels; i++) {
    if (gw) gw[i] = narrowed<W>(static_cast<Acc<W>>(of_weight[i]));
    if (gb) gb[i] = narrowed<W>(static_cast<Acc<W>>(of_bias[i]));
  }
}
void backward(const GroupNormProblem& p, const WeightedGradients& m, Workspace& workspace) {
  with_type(p.dtype,
            [&]<class T>() { with_weight_type<T>(p.wide_weight, [&]<class W>() { backward_of<T, W>(p, m, workspace); }); });
}
GradientNames gradients(const GroupNormProblem&) { return {"direct", "direct"}; }

AI3_ALGORITHM(group_norm, direct, .accuracy = Accuracy::bounded, .error_bound = 4e-6, .workspace = group_norm_workspace,
              .gradients = gradients, .backward = backward, .backward_workspace = backward_workspace)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

// Gradients by Winograd's forms. dX is the transposed convolution of dY. dW is the transpose of the forward algorithm,
//   dW = G^T [sum over tiles of (B^T x B) . (A dY A^T)] G,
// one product of (filters x tiles) and (tiles x channels) matrices for each position: the same saving.
#pragma once
#include "problem.h"
#include "winograd.h"

namespace ai3::inline AI3_LEVEL {

// One position: sums[filters][channels] (=, +=) z^T v over n tiles, whose rows are as long as those of the sums, in whole panels
// of channels.
template <class A>
void add_products_of_tiles(const A* z, int64_t filters, const A* v, int64_t channels, A* sums, int64_t n, int64_t used_filters,
                           int64_t used_channels, bool add);

// The transforms of a tile of dY and of sums, for sums of type A.
template <class Form, class A>
[[gnu::noinline]] void spread_tile(const Vec<A> (&tile)[Form::kOutputsH][Form::kOutputsW], A* z, int64_t stride) {
  Form::spread(tile, Positions<A>{z, stride});
}
template <class Form, class A>
[[gnu::noinline]] void gather_taps(const A* sums, int64_t stride, A* taps) {
  Form::gather(Positions<const A>{sums, stride}, [&](int64_t tap, Vec<A> value) { store(taps + tap * Vec<A>::width, value); });
}

namespace {

// A task owns dW of some filters by some channels of a group. Its sums and a block of transformed tiles stay in the L2 cache. The
// block does not depend on the threads, so that neither do the sums.
template <class Form, class T>
struct WinogradWeightGradient {
  using A = Acc<T>;
  using V = Vec<A>;
  static constexpr int64_t kWidth = V::width, P = kPanel<A>, kPositions = Form::kPositions, kTaps = Form::kTaps,
                           kSkew = TransformDomain<Form, T>::kSkew, kBlock = 28;
  const Conv2dProblem& p;
  TransformDomain<Form, T> domain;
  int64_t filters = 64, channels = 2 * P;  // of a task
  int64_t filter_shares, channel_shares;
  int64_t stride_y, stride_w;  // elements between positions of transformed dY and of the sums

  explicit WinogradWeightGradient(const Conv2dProblem& problem) : p(problem), domain(problem) {
    auto cut = [&] {
      filter_shares = ceil_div(domain.group_out, filters), channel_shares = ceil_div(domain.group_in, channels);
      return p.groups * filter_shares * channel_shares < p.threads;
    };
    if (cut()) channels = P;
    while (cut() && filters > kWidth) filters /= 2;
    domain.block = smaller(kBlock, domain.tiles), domain.row = channels;
    domain.stride = domain.block * channels + kSkew;
    stride_y = domain.block * filters + kSkew, stride_w = filters * channels + kSkew;
  }
  int64_t buffer_elements() const { return kPositions * (domain.stride + stride_y + stride_w) + filters; }
  int64_t workspace() const { return workspace_bytes<A>(checked_mul(p.threads, buffer_elements())); }

  void run(const T* gy, const T* x, T* dw, T* db, Workspace& memory) const {
    A* buffers = memory.take<A>(p.threads * buffer_elements());
    parallel_for(p.threads, p.groups * filter_shares * channel_shares, [&](int64_t i, int thread) {
      const int64_t group = i / channel_shares / filter_shares;
      const int64_t k = i / channel_shares % filter_shares * filters, c = i % channel_shares * channels;
      const int64_t ks = smaller(filters, domain.group_out - k), cs = smaller(channels, domain.group_in - c);
      const int64_t filter = group * domain.group_out + k, channel = group * domain.group_in + c;
      A *v = buffers + thread * buffer_elements(), *z = v + kPositions * domain.stride, *u = z + kPositions * stride_y;
      A* bias = db && c == 0 ? u + kPositions * stride_w : nullptr;
      for (int64_t f = 0; bias && f < filters; f++) bias[f] = 0;
      for (int64_t first = 0; first < domain.tiles; first += domain.block) {
        const int64_t n = smaller(domain.block, domain.tiles - first);
        for (int64_t t = 0; t < n; t++) {
          domain.transform_input(x, v - channel, first + t, t, channel, channel + cs);
          transform_gradient(gy + filter * p.y_stride.c, z + t * filters, first + t, ks, bias);
        }
        for (int64_t position = 0; position < kPositions; position++)
          add_products_of_tiles(z + position * stride_y, filters, v + position * domain.stride, channels, u + position * stride_w,
                                n, ks, cs, first > 0);
      }
      for (int64_t f = 0; f < ks; f++) {
        if (bias) narrow(bias[f], db[filter + f]);
        transform_sums(u + f * channels, cs, dw + ((filter + f) * domain.group_in + c) * kTaps);
      }
    });
  }

  // `count` filters of dY's tile t. What lies outside the output is 0.
  void transform_gradient(const T* gy, A* z, int64_t t, int64_t count, A* bias) const {
    const Axis &h = domain.h, &w = domain.w;
    const int64_t oh = h.first_output(t / w.tiles % h.tiles), ow = w.first_output(t % w.tiles);
    const int64_t rows = h.outputs(oh), columns = w.outputs(ow);
    const T* from = gy + t / (w.tiles * h.tiles) * p.y_stride.n + oh * p.y_stride.h + ow * p.y_stride.w;
    V tile[Form::kOutputsH][Form::kOutputsW] = {};
    for (int64_t f = 0; f < count; f += kWidth) {
      V sum(A{0});
      for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++) {
          tile[i][j] = load_channels(from + i * p.y_stride.h + j * p.y_stride.w + f * p.y_stride.c, p.y_stride.c,
                                     smaller(kWidth, count - f));
          sum += tile[i][j];
        }
      if (bias) store(bias + f, load(bias + f) + sum);
      spread_tile<Form, A>(tile, z + f, stride_y);
    }
  }
  // One filter's sums into its weights.
  void transform_sums(const A* u, int64_t cs, T* dw) const {
    for (int64_t c = 0; c < cs; c += kWidth) {
      alignas(64) A taps[kTaps * kWidth];
      gather_taps<Form, A>(u + c, stride_w, taps);
      for (int64_t lane = 0; lane < smaller(kWidth, cs - c); lane++)
        for (int64_t tap = 0; tap < kTaps; tap++) narrow(taps[tap * kWidth + lane], dw[(c + lane) * kTaps + tap]);
    }
  }
};

// dW's operations, with the time of a position of a weight's inverse transform.
template <class Form>
double weight_work(const Conv2dProblem& p) {
  constexpr double kInverse = 14, kOverhead = 1.2;
  const TransformDomain<Form, float> domain(p);
  const double columns = static_cast<double>(round_up(p.in_channels / p.groups, kPanel<float>));
  return static_cast<double>(p.out_channels) * columns * Form::kPositions *
         (kOverhead * 2 * static_cast<double>(domain.tiles) + kInverse);
}

// Who computes what: dX by patches where its padding would be negative, or where tiles are so few that transforming the weights
// for one use does not pay; dW by patches where so few tiles share one inverse transform.
// Forms names dX's form, WeightForms dW's.
template <class Forms, class WeightForms = Forms>
struct WinogradGradient {
  static GradientNames names(const Conv2dProblem& p, const char* name) {
    constexpr double kTransform = 60;  // the time of a transformed weight, in operations
    const Conv2dProblem t = transposed(p);
    GradientNames names = by_patches(p);
    const double filters = static_cast<double>(p.out_channels), group_in = static_cast<double>(p.in_channels / p.groups);
    const double taps = static_cast<double>(p.kernel_height * p.kernel_width);
    const double products = 2 * taps * static_cast<double>(p.batch * p.out_height * p.out_width) * filters * group_in;
    Forms::with(p, [&]<class Form>() {
      const double weights = static_cast<double>(TransformDomainTraits<Form>::packed_bytes(t)) / (p.dtype == DType::f64 ? 8 : 4);
      if (t.pad_h >= 0 && t.pad_w >= 0 && TransformDomainTraits<Form>::cost(t).flops + kTransform * weights < products)
        names.input = name;
    });
    WeightForms::with(p, [&]<class Form>() {
      if (weight_work<Form>(p) < products) names.weight = name;
    });
    return names;
  }
  static void run(const Conv2dProblem& p, const WeightedGradients& m, Workspace& workspace) {
    with_type(p.dtype, [&]<class T>() {
      const T *gy = m.grad_output.read<T>(), *x = m.input.read<T>();
      if (m.grad_weight)
        WeightForms::with(p, [&]<class Form>() {
          WinogradWeightGradient<Form, T>(p).run(gy, x, m.grad_weight.write<T>(), m.grad_bias.write<T>(), workspace);
        });
      if (!m.grad_input) return;
      Forms::with(p, [&]<class Form>() {
        const Conv2dProblem t = transposed(p);
        const TransformDomain<Form, T> domain(t);
        Acc<T>* packed = workspace.take<Acc<T>>(domain.packed_elements());
        domain.pack(m.weight.read<T>(), packed, true);
        domain.run({gy, packed, nullptr, nullptr, m.grad_input}, workspace);
      });
    });
  }
  static int64_t workspace(const Conv2dProblem& p, const WeightedGradients& m) {
    int64_t bytes = 0;
    if (m.grad_input)
      Forms::with(p, [&]<class Form>() {
        using Input = TransformDomainTraits<Form>;
        const Conv2dProblem t = transposed(p);
        bytes = checked_add(workspace_bytes<char>(Input::packed_bytes(t)), Input::workspace(t));
      });
    if (m.grad_weight)
      WeightForms::with(p, [&]<class Form>() {
        with_type(p.dtype, [&]<class T>() { bytes = checked_add(bytes, WinogradWeightGradient<Form, T>(p).workspace()); });
      });
    return bytes;
  }
};

// The one form of winograd_f2, _f4 and _f6.
template <int M>
struct FormOf3x3 {
  template <class Body>
  AI3_INLINE static auto with(const Conv2dProblem&, const Body& body) {
    return body.template operator()<Winograd<M>>();
  }
};

#define AI3_WINOGRAD_GRADIENTS(NAME, ...)                                                            \
  .gradients = [](const Conv2dProblem& p) { return WinogradGradient<__VA_ARGS__>::names(p, NAME); }, \
  .backward = WinogradGradient<__VA_ARGS__>::run, .backward_workspace = WinogradGradient<__VA_ARGS__>::workspace

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

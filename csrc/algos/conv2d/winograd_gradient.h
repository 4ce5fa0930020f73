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

// What the gradient takes of a form, for sums of type A.
template <class A>
struct GradientForm {
  int64_t positions, taps, rows, columns;  // the latter two: outputs of a tile
  // The transforms of a tile of x (Phases), of one of dY, [row][column] of one vector of filters, and of sums.
  void (*input)(const DomainPlan& d, const void* x, void* v, int64_t t, int64_t slot, int64_t begin, int64_t end);
  void (*spread)(const Vec<A>* tile, A* z, int64_t stride);
  void (*gather)(const A* sums, int64_t stride, A* taps);
};
template <class Form, class A>
[[gnu::noinline]] void spread_tile(const Vec<A>* tile, A* z, int64_t stride) {
  Vec<A> y[Form::kOutputsH][Form::kOutputsW];
  __builtin_memcpy(y, tile, sizeof(y));
  Form::spread(y, Positions<A>{z, stride});
}
template <class Form, class A>
[[gnu::noinline]] void gather_taps(const A* sums, int64_t stride, A* taps) {
  Form::gather(Positions<const A>{sums, stride}, [&](int64_t tap, Vec<A> value) { store(taps + tap * Vec<A>::width, value); });
}
template <class Form, class T>
AI3_INLINE GradientForm<Acc<T>> gradient_form() {
  using A = Acc<T>;
  return {Form::kPositions,     Form::kTaps,         Form::kOutputsH, Form::kOutputsW, TransformDomain<Form, T>::phases().input,
          spread_tile<Form, A>, gather_taps<Form, A>};
}

// A task owns dW of some filters by some channels of a group. Its sums and a block of transformed tiles stay in the L2 cache. The
// block does not depend on the threads, so that neither do the sums. Nothing here is in a form's inner loops: it is compiled for
// the types alone (winograd_gradient.cpp).
template <class T>
struct WinogradWeightGradient {
  using A = Acc<T>;
  using V = Vec<A>;
  static constexpr int64_t kWidth = V::width, P = kPanel<A>, kBlock = 28;
  static constexpr int kMostOutputs = 6 * 6, kMostTaps = 5 * 5;  // of a tile
  const Conv2dProblem& p;
  DomainPlan& domain;  // a form's TransformDomain of T
  const GradientForm<A> form;
  int64_t filters = 64, channels = 2 * P;  // of a task
  int64_t filter_shares, channel_shares;
  int64_t stride_y, stride_w;  // elements between positions of transformed dY and of the sums

  WinogradWeightGradient(DomainPlan& of, const GradientForm<A>& by);
  int64_t buffer_elements() const { return form.positions * (domain.stride + stride_y + stride_w) + filters; }
  int64_t workspace() const { return workspace_bytes<A>(checked_mul(p.threads, buffer_elements())); }
  void run(const T* gy, const T* x, T* dw, T* db, Workspace& memory) const;

 private:
  void transform_gradient(const T* gy, A* z, int64_t t, int64_t count, A* bias) const;
  void transform_sums(const A* u, int64_t cs, T* dw) const;
};
// body(gradient) with that of a form.
template <class Form, class T, class Body>
AI3_INLINE void with_weight_gradient(const Conv2dProblem& p, const Body& body) {
  static_assert(Form::kOutputsH * Form::kOutputsW <= WinogradWeightGradient<T>::kMostOutputs);
  static_assert(Form::kTaps <= WinogradWeightGradient<T>::kMostTaps);
  TransformDomain<Form, T> domain(p);
  body(WinogradWeightGradient<T>(domain, gradient_form<Form, T>()));
}

namespace {

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
          with_weight_gradient<Form, T>(
              p, [&](const auto& gradient) { gradient.run(gy, x, m.grad_weight.write<T>(), m.grad_bias.write<T>(), workspace); });
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
        with_type(p.dtype, [&]<class T>() {
          with_weight_gradient<Form, T>(p, [&](const auto& gradient) { bytes = checked_add(bytes, gradient.workspace()); });
        });
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

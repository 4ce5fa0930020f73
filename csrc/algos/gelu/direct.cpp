// x times the share of the normal distribution that lies below x, in one pass; or with that share by tanh (Hendrycks & Gimpel,
// "Gaussian error linear units", 2016). Of negative x the share is a product and never a difference, so that it keeps its bits
// however small it becomes.
#include "../core/elementwise.h"
#include "../core/epilogue.h"
#include "problem.h"

namespace ai3::inline AI3_LEVEL {
namespace {

// The share below -size, of size >= 0: e^(-size^2 / 2) times a polynomial of t = 1 / (1 + size / sqrt 8), which was fitted to
// within 5e-8 of its value. The square is taken with what its rounding loses, without which e to its power would lose more.
AI3_INLINE Vec<float> share_below_minus(Vec<float> size) {
  using V = Vec<float>;
  const V v = at_most(V(15.f), size), half = v * V(.5f), square = half * v;
  const V lost = fma(half, v, V(V::Raw{} - square.raw));
  const V t = V(1.f) / fma(v, V(0.35355339f), V(1.f));
  V p = -0.029596012f;
  for (float c : {0.14258854f, -0.24422514f, 0.13975097f, -0.013808524f, 0.10155381f, 0.12149855f, 0.141195f, 0.14104278f})
    p = fma(p, t, V(c));
  return p * t * (exp(V(V::Raw{} - square.raw)) * (V(1.f) - lost));
}
AI3_INLINE Vec<float> gelu(Vec<float> v) {
  using V = Vec<float>;
  const V q = share_below_minus(V(v.raw < V::Raw{} ? -v.raw : v.raw)), above = V(1.f) - q;
  return v * V(v.raw < V::Raw{} ? q.raw : above.raw);
}
AI3_INLINE Vec<double> gelu(Vec<double> v) { return activate(Activation::gelu, v); }

template <class T>
void gelu_direct(const ElementwiseProblem& p, const T* x, T* y, Workspace&) {
  using V = Vec<Acc<T>>;
  if (p.form == 1) return map_elements(p, x, y, 1 << 13, [](V v) { return activate(Activation::gelu_tanh, v); });
  map_elements(p, x, y, 1 << 13, [](V v) { return gelu(v); });
}

AI3_ALGORITHM(gelu, direct, .accuracy = Accuracy::bounded, .error_bound = 4e-6, .sliced = true)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL

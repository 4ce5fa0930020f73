// What a packed operator does to its input as it reads it: x * scale + shift, of each channel, then relu. That is the batch
// normalization and activation before a convolution (He et al., "Identity mappings in deep residual networks", 2016; DenseNet).
// Padding comes after it: zeros stay zeros, and kernels that never read them need nothing for that.
#pragma once
#include "algorithm.h"
#include "lanes.h"

namespace ai3::inline AI3_LEVEL {

template <class A>
struct Prologue {
  const A *scale, *shift;  // null: x is left as it is
  A least;                 // of the results

  template <class Problem>
  AI3_INLINE Prologue(const Problem& p, const typename Problem::Operands& m)
      : scale(m.scale.template read<A>()),
        shift(m.shift.template read<A>()),
        least(p.input_relu ? A(0) : static_cast<A>(-__builtin_huge_val())) {}
  AI3_INLINE explicit operator bool() const { return scale; }
  // Of the channels from `channel` on.
  AI3_INLINE Prologue from(int64_t channel) const {
    Prologue rest = *this;
    if (scale) rest.scale += channel, rest.shift += channel;
    return rest;
  }
  AI3_INLINE Vec<A> operator()(Vec<A> x, Vec<A> scales, Vec<A> shifts) const {
    const Vec<A> y = fma(x, scales, shifts), low(least);
    return at_least(low, y);
  }
  // One element, of the first channel.
  AI3_INLINE A operator()(A x) const {
    if (!scale) return x;
    const A y = fma1(x, *scale, *shift);
    return y < least ? least : y;
  }
};

template <class T, class Map>
AI3_INLINE void copy_mapped(const T* from, int64_t count, Acc<T>* to, const Map& map) {
  using V = Vec<Acc<T>>;
  int64_t i = 0;
  for (; i + V::width <= count; i += V::width) store(to + i, map(load(from + i), i, V::width));
  if (i < count) store_partial(to + i, map(load_partial(from + i, count - i), i, count - i), count - i);
}
// Copies neighbouring channels of a pixel, the prologue applied.
template <class T>
AI3_INLINE void copy_channels(const Prologue<Acc<T>>& f, const T* from, int64_t count, Acc<T>* to) {
  using V = Vec<Acc<T>>;
  if (!f) return copy_mapped(from, count, to, [](V x, int64_t, int64_t) { return x; });
  auto some = [](const Acc<T>* p, int64_t n) { return n < V::width ? load_partial(p, n) : load(p); };
  copy_mapped(from, count, to, [&](V x, int64_t i, int64_t n) { return f(x, some(f.scale + i, n), some(f.shift + i, n)); });
}
// Copies neighbouring pixels of the first channel, the prologue applied.
template <class T>
AI3_INLINE void copy_pixels(const Prologue<Acc<T>>& f, const T* from, int64_t count, Acc<T>* to) {
  using V = Vec<Acc<T>>;
  if (!f) return copy_mapped(from, count, to, [](V x, int64_t, int64_t) { return x; });
  copy_mapped(from, count, to,
              [&, scale = V(*f.scale), shift = V(*f.shift)](V x, int64_t, int64_t) { return f(x, scale, shift); });
}

}  // namespace ai3::inline AI3_LEVEL

// The parts of winograd_gradient.h that are the same for every form.
#include "winograd_gradient.h"

namespace ai3::inline AI3_LEVEL {
namespace {

// Columns of a matrix as rows, times some columns of another one.
template <class A>
struct Columns {
  const A* data;
  int64_t stride;
  const A* other;
  int64_t other_stride;
  AI3_INLINE Columns from(int64_t row) const { return {data + row, stride, other, other_stride}; }
  template <int R, bool half>
  AI3_INLINE void multiply(MicroTile<A, R, half>& tile, const A*, int64_t k, Next) const {
    for (int64_t i = 0; i < k; i++) {
      const Vec<A> b0 = load(other + i * other_stride), b1 = half ? b0 : load(other + i * other_stride + Vec<A>::width);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        const Vec<A> a = data[i * stride + r];
        tile.left[r] = fma(a, b0, tile.left[r]);
        if constexpr (!half) tile.right[r] = fma(a, b1, tile.right[r]);
      }
    }
  }
};

}  // namespace

template <class A>
void add_products_of_tiles(const A* z, int64_t filters, const A* v, int64_t channels, A* sums, int64_t n, int64_t used_filters,
                           int64_t used_channels, bool add) {
  constexpr int64_t P = kPanel<A>;
  const int64_t slabs = ceil_div(used_filters, kRows);
  for (int64_t c = 0; c < used_channels; c += P)
    for (int64_t s = 0; s < slabs; s++) {
      const Share r = share(used_filters, slabs, s);
      Output<A> out{sums + r.begin * channels + c, channels};
      out.add = add;
      multiply_slab<A>(Columns<A>{z + r.begin, filters, v + c, channels}, r.end - r.begin, static_cast<const A*>(nullptr), P, n,
                       out, {reinterpret_cast<const char*>(z), 0});
    }
}

template <class T>
WinogradWeightGradient<T>::WinogradWeightGradient(DomainPlan& of, const GradientForm<A>& by) : p(of.p), domain(of), form(by) {
  auto cut = [&] {
    filter_shares = ceil_div(domain.group_out, filters), channel_shares = ceil_div(domain.group_in, channels);
    return p.groups * filter_shares * channel_shares < p.threads;
  };
  if (cut()) channels = P;
  while (cut() && filters > kWidth) filters /= 2;
  const int64_t skew = domain.sizes.skew();
  domain.block = smaller(kBlock, domain.tiles), domain.row = channels;
  domain.stride = domain.block * channels + skew;
  stride_y = domain.block * filters + skew, stride_w = filters * channels + skew;
}

template <class T>
void WinogradWeightGradient<T>::run(const T* gy, const T* x, T* dw, T* db, Workspace& memory) const {
  A* buffers = memory.take<A>(p.threads * buffer_elements());
  parallel_for(p.threads, p.groups * filter_shares * channel_shares, [&](int64_t i, int thread) {
    const int64_t group = i / channel_shares / filter_shares;
    const int64_t k = i / channel_shares % filter_shares * filters, c = i % channel_shares * channels;
    const int64_t ks = smaller(filters, domain.group_out - k), cs = smaller(channels, domain.group_in - c);
    const int64_t filter = group * domain.group_out + k, channel = group * domain.group_in + c;
    A *v = buffers + thread * buffer_elements(), *z = v + form.positions * domain.stride, *u = z + form.positions * stride_y;
    A* bias = db && c == 0 ? u + form.positions * stride_w : nullptr;
    for (int64_t f = 0; bias && f < filters; f++) bias[f] = 0;
    for (int64_t first = 0; first < domain.tiles; first += domain.block) {
      const int64_t n = smaller(domain.block, domain.tiles - first);
      for (int64_t t = 0; t < n; t++) {
        form.input(domain, x, v - channel, first + t, t, channel, channel + cs);
        transform_gradient(gy + filter * p.y_stride.c, z + t * filters, first + t, ks, bias);
      }
      for (int64_t position = 0; position < form.positions; position++)
        add_products_of_tiles(z + position * stride_y, filters, v + position * domain.stride, channels, u + position * stride_w,
                              n, ks, cs, first > 0);
    }
    for (int64_t f = 0; f < ks; f++) {
      if (bias) narrow(bias[f], db[filter + f]);
      transform_sums(u + f * channels, cs, dw + ((filter + f) * domain.group_in + c) * form.taps);
    }
  });
}

// `count` filters of dY's tile t. What lies outside the output is 0.
template <class T>
void WinogradWeightGradient<T>::transform_gradient(const T* gy, A* z, int64_t t, int64_t count, A* bias) const {
  const Axis &h = domain.h, &w = domain.w;
  const int64_t oh = h.first_output(t / w.tiles % h.tiles), ow = w.first_output(t % w.tiles);
  const int64_t rows = h.outputs(oh), columns = w.outputs(ow);
  const T* from = gy + t / (w.tiles * h.tiles) * p.y_stride.n + oh * p.y_stride.h + ow * p.y_stride.w;
  V tile[kMostOutputs];
  for (int64_t i = 0; i < form.rows * form.columns; i++) tile[i] = V(A{0});
  for (int64_t f = 0; f < count; f += kWidth) {
    V sum(A{0});
    for (int64_t i = 0; i < rows; i++)
      for (int64_t j = 0; j < columns; j++) {
        const V v = load_channels(from + i * p.y_stride.h + j * p.y_stride.w + f * p.y_stride.c, p.y_stride.c,
                                  smaller(kWidth, count - f));
        tile[i * form.columns + j] = v;
        sum += v;
      }
    if (bias) store(bias + f, load(bias + f) + sum);
    form.spread(tile, z + f, stride_y);
  }
}
// One filter's sums into its weights.
template <class T>
void WinogradWeightGradient<T>::transform_sums(const A* u, int64_t cs, T* dw) const {
  for (int64_t c = 0; c < cs; c += kWidth) {
    alignas(64) A taps[kMostTaps * kWidth];
    form.gather(u + c, stride_w, taps);
    for (int64_t lane = 0; lane < smaller(kWidth, cs - c); lane++)
      for (int64_t tap = 0; tap < form.taps; tap++) narrow(taps[tap * kWidth + lane], dw[(c + lane) * form.taps + tap]);
  }
}

template void add_products_of_tiles<float>(const float*, int64_t, const float*, int64_t, float*, int64_t, int64_t, int64_t, bool);
template struct WinogradWeightGradient<float>;
#ifndef AI3_ONLY_FLOAT32
template void add_products_of_tiles<double>(const double*, int64_t, const double*, int64_t, double*, int64_t, int64_t, int64_t,
                                            bool);
template struct WinogradWeightGradient<double>;
template struct WinogradWeightGradient<bfloat16>;
template struct WinogradWeightGradient<float16>;
#endif

}  // namespace ai3::inline AI3_LEVEL

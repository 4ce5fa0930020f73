// The products of winograd_gradient.h, which are the same for every form.
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

template void add_products_of_tiles<float>(const float*, int64_t, const float*, int64_t, float*, int64_t, int64_t, int64_t, bool);
#ifndef AI3_ONLY_FLOAT32
template void add_products_of_tiles<double>(const double*, int64_t, const double*, int64_t, double*, int64_t, int64_t, int64_t,
                                            bool);
#endif

}  // namespace ai3::inline AI3_LEVEL

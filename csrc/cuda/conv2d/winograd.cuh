// Winograd convolutions F(m x m, 3 x 3) (Lavin & Gray 2015): tiles of m x m outputs are computed from (m + 2)^2 transformed
// elements, one product of matrices for each of these places. Own kernels transform, cuBLAS multiplies all places in one call, in
// the type of sums; tiles go through the workspace in chunks, so that it stays bounded.
#pragma once
#include "../core/cublas.cuh"
#include "../core/device.cuh"
#include "gradients.cuh"

namespace ai3::inline AI3_LEVEL {

// The transforms in one dimension; both are applied to columns, then to rows. A is float or double.
template <int m>
struct Transform;
template <>
struct Transform<2> {  // points 0, 1, -1
  template <class A>
  static __device__ __forceinline__ void input(const A (&d)[4], A (&o)[4]) {
    o[0] = d[0] - d[2], o[1] = d[1] + d[2], o[2] = d[2] - d[1], o[3] = d[1] - d[3];
  }
  static __device__ __forceinline__ void weight(const double (&g)[3], double (&o)[4]) {
    o[0] = g[0], o[1] = (g[0] + g[1] + g[2]) / 2, o[2] = (g[0] - g[1] + g[2]) / 2, o[3] = g[2];
  }
  template <class A>
  static __device__ __forceinline__ void output(const A (&s)[4], A (&o)[2]) {
    o[0] = s[0] + s[1] + s[2], o[1] = s[1] - s[2] - s[3];
  }
};
template <>
struct Transform<4> {  // points 0, 1, -1, 2, -2
  template <class A>
  static __device__ __forceinline__ void input(const A (&d)[6], A (&o)[6]) {
    const A even = d[4] - A(4) * d[2], odd = d[3] - A(4) * d[1], even2 = d[4] - d[2], odd2 = A(2) * (d[3] - d[1]);
    o[0] = A(4) * d[0] - A(5) * d[2] + d[4];
    o[1] = even + odd, o[2] = even - odd, o[3] = even2 + odd2, o[4] = even2 - odd2;
    o[5] = A(4) * d[1] - A(5) * d[3] + d[5];
  }
  static __device__ __forceinline__ void weight(const double (&g)[3], double (&o)[6]) {
    const double even = g[0] + g[2], far = g[0] + 4 * g[2];
    o[0] = g[0] / 4, o[1] = -(even + g[1]) / 6, o[2] = -(even - g[1]) / 6;
    o[3] = (far + 2 * g[1]) / 24, o[4] = (far - 2 * g[1]) / 24, o[5] = g[2];
  }
  template <class A>
  static __device__ __forceinline__ void output(const A (&s)[6], A (&o)[4]) {
    const A sum = s[1] + s[2], difference = s[1] - s[2], sum2 = s[3] + s[4], difference2 = s[3] - s[4];
    o[0] = s[0] + sum + sum2, o[1] = difference + A(2) * difference2, o[2] = sum + A(4) * sum2,
    o[3] = difference + A(8) * difference2 + s[5];
  }
};

template <int m>
struct Winograd {
  static constexpr int kSide = m + 2, kPlaces = kSide * kSide;

  static bool supports(const Conv2dProblem& p, Reason& reason) {
    if (!device_supports(p, reason)) return false;
    auto differs = [](int64_t value, int64_t wanted) { return value >= 0 && value != wanted; };
    if (differs(p.kernel_height, 3) || differs(p.kernel_width, 3))
      return refuse(reason, "needs a 3x3 kernel, got (%lld, %lld)", static_cast<long long>(p.kernel_height),
                    static_cast<long long>(p.kernel_width));
    if (differs(p.stride_h, 1) || differs(p.stride_w, 1) || differs(p.dilation_h, 1) || differs(p.dilation_w, 1))
      return refuse(reason, "needs stride and dilation 1, got stride (%lld, %lld), dilation (%lld, %lld)",
                    static_cast<long long>(p.stride_h), static_cast<long long>(p.stride_w), static_cast<long long>(p.dilation_h),
                    static_cast<long long>(p.dilation_w));
    return cublas_supports({p.in_channels, p.out_channels}, reason);
  }

  static int64_t size_of_sums(const Conv2dProblem& p) { return p.dtype == DType::f64 ? 8 : 4; }
  static int64_t tiles_of(const Conv2dProblem& p) {
    return checked_product({p.batch, ceil_div(p.out_height, m), ceil_div(p.out_width, m)});
  }
  static int64_t chunk_of(const Conv2dProblem& p) {
    const int64_t tile = checked_product({kPlaces, checked_add(p.in_channels, p.out_channels), size_of_sums(p)});
    const int64_t tiles = tiles_of(p), chunk = tile > 0 && AI3_PATCH_BYTES / tile > 1 ? AI3_PATCH_BYTES / tile : 1;
    return chunk < tiles ? chunk : tiles;
  }
  static int64_t workspace(const Conv2dProblem& p) {
    auto bytes = [&](int64_t channels) {
      return piece_bytes<char>(checked_product({kPlaces, chunk_of(p), channels, size_of_sums(p)}));
    };
    return checked_add(cublas_workspace(), checked_add(bytes(p.in_channels), bytes(p.out_channels)));
  }

  // The transformed weight, (places, K, C / groups) in the type of sums.
  static int64_t packed_bytes(const Conv2dProblem& p) {
    return piece_bytes<char>(checked_product({kPlaces, p.out_channels, p.in_channels / p.groups, size_of_sums(p)}));
  }
  static void pack(const Conv2dProblem& p, const Operand& weight, const Operand& packed, Workspace& workspace) {
    with_type(p.dtype, [&]<class T>() { transform_weight(p, weight.read<T>(), packed.write<Acc<T>>(), workspace); });
  }
  template <class T>
  static void transform_weight(const Conv2dProblem& p, const T* w, Acc<T>* u, const Workspace& workspace) {
    const int64_t filters = p.out_channels * (p.in_channels / p.groups);
    for_each(filters, workspace, "a Winograd transform of weights", [=] __device__(int64_t i) {
      double columns[3][kSide], o[kSide];
      for (int s = 0; s < 3; s++) {
        double g[3];
        for (int r = 0; r < 3; r++) g[r] = static_cast<double>(load_acc(w + i * 9 + r * 3 + s));
        Transform<m>::weight(g, columns[s]);
      }
      for (int r = 0; r < kSide; r++) {
        const double g[3] = {columns[0][r], columns[1][r], columns[2][r]};
        Transform<m>::weight(g, o);
        for (int s = 0; s < kSide; s++) u[(r * kSide + s) * filters + i] = static_cast<Acc<T>>(o[s]);
      }
    });
  }

  // v[place][tile][channel] or v[place][channel][tile], as x lies in memory.
  template <class T>
  static void transform_input(const Conv2dProblem& p, int64_t first, int64_t tiles, bool channels_last, const T* x, Acc<T>* v,
                              const Workspace& workspace) {
    using A = Acc<T>;
    const int64_t across = ceil_div(p.out_width, m), down = ceil_div(p.out_height, m), channels = p.in_channels;
    for_each(tiles * channels, workspace, "a Winograd transform of inputs", [=] __device__(int64_t i) {
      const Quotient of = divided(i, channels_last ? channels : tiles);
      const int64_t c = channels_last ? of.rest : of.quotient, tile = first + (channels_last ? of.quotient : of.rest);
      const Quotient row = divided(tile, across), image = divided(row.quotient, down);
      const int64_t top = image.rest * m - p.pad_h, left = row.rest * m - p.pad_w;
      const T* plane = x + image.quotient * p.x_stride.n + c * p.x_stride.c;
      A columns[kSide][kSide];
#pragma unroll
      for (int s = 0; s < kSide; s++) {
        A d[kSide];
        const int64_t w = left + s;
#pragma unroll
        for (int r = 0; r < kSide; r++) {
          const int64_t h = top + r;
          const bool inside = h >= 0 && h < p.in_height && w >= 0 && w < p.in_width;
          d[r] = inside ? load_acc(plane + h * p.x_stride.h + w * p.x_stride.w) : A(0);
        }
        Transform<m>::input(d, columns[s]);
      }
#pragma unroll
      for (int r = 0; r < kSide; r++) {
        A d[kSide], o[kSide];
#pragma unroll
        for (int s = 0; s < kSide; s++) d[s] = columns[s][r];
        Transform<m>::input(d, o);
#pragma unroll
        for (int s = 0; s < kSide; s++) v[(r * kSide + s) * tiles * channels + i] = o[s];
      }
    });
  }

  // From sums[place][tile][k] or sums[place][k][tile].
  template <class T>
  static void transform_output(const Conv2dProblem& p, int64_t first, int64_t tiles, bool channels_last, const Acc<T>* sums,
                               const T* b, T* y, const Workspace& workspace) {
    using A = Acc<T>;
    const int64_t across = ceil_div(p.out_width, m), down = ceil_div(p.out_height, m), kernels = p.out_channels;
    for_each(tiles * kernels, workspace, "a Winograd transform of outputs", [=] __device__(int64_t i) {
      const Quotient of = divided(i, channels_last ? kernels : tiles);
      const int64_t k = channels_last ? of.rest : of.quotient, tile = first + (channels_last ? of.quotient : of.rest);
      const Quotient row = divided(tile, across), image = divided(row.quotient, down);
      const int64_t top = image.rest * m, left = row.rest * m;
      T* plane = y + image.quotient * p.y_stride.n + k * p.y_stride.c;
      A columns[kSide][m];
#pragma unroll
      for (int s = 0; s < kSide; s++) {
        A d[kSide];
#pragma unroll
        for (int r = 0; r < kSide; r++) d[r] = sums[(r * kSide + s) * tiles * kernels + i];
        Transform<m>::output(d, columns[s]);
      }
      const A bias = b ? load_acc(b + k) : A(0);
#pragma unroll
      for (int r = 0; r < m; r++) {
        A d[kSide], o[m];
#pragma unroll
        for (int s = 0; s < kSide; s++) d[s] = columns[s][r];
        Transform<m>::output(d, o);
#pragma unroll
        for (int s = 0; s < m; s++)
          if (top + r < p.out_height && left + s < p.out_width)
            store_acc(plane + (top + r) * p.y_stride.h + (left + s) * p.y_stride.w, o[s] + bias);
      }
    });
  }

  template <class T>
  static void run(const Conv2dProblem& p, const Conv2dOperands& operands, Workspace& workspace) {
    using A = Acc<T>;
    const int64_t channels = p.in_channels / p.groups, kernels = p.out_channels / p.groups;
    const int64_t all = tiles_of(p), chunk = chunk_of(p);
    const bool channels_last = p.y_stride.c == 1;
    void* scratch = take<char>(workspace, cublas_workspace());
    A* const v = take<A>(workspace, kPlaces * chunk * p.in_channels);
    A* const sums = take<A>(workspace, kPlaces * chunk * p.out_channels);
    const A* const u = operands.weight.read<A>();
    const DType type = p.dtype == DType::f64 ? DType::f64 : DType::f32;
    const bool allow_tf32 = p.allow_tf32 && p.dtype == DType::f32;
    for (int64_t first = 0; first < all; first += chunk) {
      const int64_t tiles = all - first < chunk ? all - first : chunk;
      transform_input(p, first, tiles, channels_last, operands.input.read<T>(), v, workspace);
      for (int64_t g = 0; g < p.groups; g++) {
        const A* weights = u + g * kernels * channels;
        const int64_t of_weights = p.out_channels * channels, of_inputs = tiles * p.in_channels, of_sums = tiles * p.out_channels;
        if (channels_last)
          cublas_gemm(type, allow_tf32,
                      {tiles, kernels, channels, v + g * channels, p.in_channels, of_inputs, false, weights, channels, of_weights,
                       true, sums + g * kernels, p.out_channels, of_sums, kPlaces, false},
                      scratch);
        else
          cublas_gemm(type, allow_tf32,
                      {kernels, tiles, channels, weights, channels, of_weights, false, v + g * channels * tiles, tiles, of_inputs,
                       false, sums + g * kernels * tiles, tiles, of_sums, kPlaces, false},
                      scratch);
      }
      transform_output(p, first, tiles, channels_last, sums, operands.bias.read<T>(), operands.output.write<T>(), workspace);
    }
  }
};

#define AI3_WINOGRAD(m)                                                                                              \
  .supports = Winograd<m>::supports, .workspace = Winograd<m>::workspace, .packed_bytes = Winograd<m>::packed_bytes, \
  .pack = Winograd<m>::pack, .gradients = gradients_by_im2col

}  // namespace ai3::inline AI3_LEVEL

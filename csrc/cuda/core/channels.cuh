// How normalizations over channels share out their work: each thread has some pixels of one channel of one image. In planes of
// many pixels the lanes of a warp take neighbouring ones; of small planes a thread takes its own, and so in channels_last, where
// neighbours take the neighbouring channels.
#pragma once
#include "../../algos/core/channels_problem.h"
#include "moments.cuh"

namespace ai3::inline AI3_LEVEL {

struct Shares {
  static constexpr int64_t kPixelsOfThread = 32;
  Channels of;
  int64_t planes, lanes, pixels, count;  // of all images and channels; of a share; of a plane

  explicit Shares(const Channels& c)
      : of(c),
        planes(checked_mul(c.batch, c.channels)),
        lanes(c.last || c.pixels < kWarp ? 1 : kWarp),
        pixels(lanes * kPixelsOfThread),
        count(ceil_div(c.pixels, pixels)) {}
  int64_t threads() const { return checked_product({planes, count, lanes}); }

  // Of a thread: the elements begin, begin + step, ... before end.
  struct Mine {
    int64_t image, channel, share, begin, end, step;
    bool first;  // of its lanes
  };
  __device__ __forceinline__ Mine of_thread(int64_t i) const {
    if (of.last) {
      const Quotient at = divided(i, of.channels), share = divided(at.quotient, count);
      const int64_t begin = share.rest * pixels, image = share.quotient * of.pixels;
      return {share.quotient,
              at.rest,
              share.rest,
              (image + begin) * of.channels + at.rest,
              (image + begin + pixels_in(share.rest)) * of.channels + at.rest,
              of.channels,
              true};
    }
    const Quotient lane = divided(i, lanes), share = divided(lane.quotient, count), plane = divided(share.quotient, of.channels);
    const int64_t begin = share.quotient * of.pixels + share.rest * pixels;
    return {plane.quotient, plane.rest, share.rest, begin + lane.rest, begin + pixels_in(share.rest), lanes, lane.rest == 0};
  }
  __device__ __forceinline__ int64_t pixels_in(int64_t share) const { return min(pixels, of.pixels - share * pixels); }
  __device__ __forceinline__ int64_t plane(int64_t image, int64_t channel) const { return image * of.channels + channel; }
  // The sum over the lanes of a share, for each of them, all of which call it.
  template <class A>
  __device__ __forceinline__ A sum(A value) const {
    return lanes == 1 ? value : of_warp(value, Sum());
  }
};

// Bytes of workspace that sum_channels takes.
template <class A>
int64_t sum_channels_bytes(const Shares& s) {
  return s.count == 1 ? 0 : piece_bytes<A>(checked_product({2, s.count, s.planes}));
}
// totals[plane] and totals[planes + plane] = the sums over a plane's elements e of what term(share, e) makes of them. In one
// order.
template <class A, class Term>
void sum_channels(const Shares& s, A* totals, Workspace& workspace, const char* what, const Term& term) {
  A* const parts = s.count == 1 ? totals : take<A>(workspace, 2 * s.count * s.planes);
  for_each(s.threads(), workspace, what, [=] __device__(int64_t i) {
    const Shares::Mine mine = s.of_thread(i);
    A sums[2] = {0, 0};
    for (int64_t e = mine.begin; e < mine.end; e += mine.step) term(mine, e, sums);
    for (int64_t j = 0; j < 2; j++) {
      const A sum = s.sum(sums[j]);
      if (mine.first) parts[(j * s.count + mine.share) * s.planes + s.plane(mine.image, mine.channel)] = sum;
    }
  });
  if (s.count == 1) return;
  for_each(2 * s.planes, workspace, what, [=] __device__(int64_t i) {
    const int64_t j = i / s.planes, plane = i % s.planes;
    A sum = 0;
    for (int64_t share = 0; share < s.count; share++) sum += parts[(j * s.count + share) * s.planes + plane];
    totals[i] = sum;
  });
}
// The gradients of bias and weight, as far as they are wanted, from such sums of dY and of dY times the normalized values.
template <class A, class W>
void sum_images(const Shares& s, const A* totals, W* of_bias, W* of_weight, const Workspace& workspace, const char* what) {
  for_each(s.of.channels, workspace, what, [=] __device__(int64_t channel) {
    A bias = 0, weight = 0;
    for (int64_t i = channel; i < s.planes; i += s.of.channels) bias += totals[i], weight += totals[s.planes + i];
    if (of_bias) store_acc(of_bias + channel, static_cast<Acc<W>>(bias));
    if (of_weight) store_acc(of_weight + channel, static_cast<Acc<W>>(weight));
  });
}

}  // namespace ai3::inline AI3_LEVEL

// Sums over the pixels of each channel of each image, and what is computed of each channel with numbers of its own: the passes of
// normalizations over channels. Planes: a channel of an image is a run of memory, and its numbers fill vectors. Pixel by pixel
// (channels_last): lanes are channels; sums of a block of pixels come first, so that threads share an image.
#pragma once
#include "algorithm.h"
#include "channels_problem.h"
#include "moments.h"

namespace ai3::inline AI3_LEVEL {

inline constexpr int64_t kPixelsOfBlock = 256;    // whose sums are taken in the accumulator's type
inline constexpr int64_t kElementsOfShare = 4096;  // that are worth a thread

AI3_INLINE int64_t pixel_blocks(const Channels& c) { return ceil_div(c.pixels, kPixelsOfBlock); }
// Bytes of workspace that sum_channels takes.
template <class A>
AI3_INLINE int64_t sum_channels_bytes(const Channels& c, int outputs) {
  return c.last ? workspace_bytes<A>(checked_product({outputs, c.batch, pixel_blocks(c), c.channels})) : 0;
}

// A number for each channel: `own` of each image's, or the same of all images.
template <class A>
struct PerChannel {
  const A* numbers;
  bool own;
  AI3_INLINE const A* of_image(const Channels& c, int64_t n) const { return numbers + (own ? n * c.channels : 0); }
};
// Of some elements, which are of one channel or of neighbouring ones.
template <class A>
struct OfElements {
  int64_t channel, count;
  bool neighbours;
  AI3_INLINE Vec<A> operator()(const A* numbers) const {
    return neighbours ? load_some(numbers + channel, count) : Vec<A>(numbers[channel]);
  }
};

// total[o * batch * channels + image * channels + channel] = the sum of what body(sums, element, n, image, of) adds to sums[o] of
// up to a vector of elements from `element` on, 0 beyond the last of n; `of` reads their channels' numbers. In one order, whatever
// the threads.
template <int outputs, class A, class Body>
void sum_channels(int threads, const Channels& c, double* total, Workspace& workspace, const Body& body) {
  constexpr int64_t width = Vec<A>::width;
  const int64_t all = c.batch * c.channels;
  if (!c.last) {
    parallel_ranges(threads, all, larger(1, kElementsOfShare / larger(1, c.pixels)), [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; i++) {
        const int64_t n = i / c.channels, first = i * c.pixels;
        double sums[outputs];
        sum_row<outputs, A>(c.pixels, sums, [&](Vec<A>* s, int64_t e, int64_t count) {
          body(s, first + e, count, n, OfElements<A>{i % c.channels, count, false});
        });
        for (int o = 0; o < outputs; o++) total[o * all + i] = sums[o];
      }
    });
    return;
  }
  const int64_t blocks = pixel_blocks(c), vectors = ceil_div(c.channels, width);
  A* const partial = workspace.take<A>(outputs * c.batch * blocks * c.channels);
  parallel_ranges(threads, c.batch * blocks * vectors, larger(1, kElementsOfShare / (width * smaller(kPixelsOfBlock, larger(1, c.pixels)))),
                  [&](int64_t begin, int64_t end, int) {
                    for (int64_t i = begin; i < end; i++) {
                      const int64_t block = i / vectors, n = block / blocks, channel = i % vectors * width,
                                    count = smaller(width, c.channels - channel), first = block % blocks * kPixelsOfBlock,
                                    pixels = smaller(kPixelsOfBlock, c.pixels - first);
                      constexpr int together = 4;  // chains of sums
                      Vec<A> sums[together][outputs];
                      for (auto& of_one : sums)
                        for (auto& s : of_one) s = Vec<A>(A(0));
                      const OfElements<A> of{channel, count, true};
                      const int64_t from = (n * c.pixels + first) * c.channels + channel;
                      int64_t pixel = 0;
                      for (; pixel + together <= pixels; pixel += together)
#pragma GCC unroll 4
                        for (int j = 0; j < together; j++) body(sums[j], from + (pixel + j) * c.channels, count, n, of);
                      for (; pixel < pixels; pixel++) body(sums[0], from + pixel * c.channels, count, n, of);
                      for (int o = 0; o < outputs; o++)
                        store_some(partial + (o * c.batch * blocks + block) * c.channels + channel,
                                   (sums[0][o] + sums[1][o]) + (sums[2][o] + sums[3][o]), count);
                    }
                  });
  for (int64_t i = 0; i < outputs * c.batch; i++)
    for (int64_t channel = 0; channel < c.channels; channel++) {
      double sum = 0;
      for (int64_t b = 0; b < blocks; b++) sum += static_cast<double>(partial[(i * blocks + b) * c.channels + channel]);
      total[i * c.channels + channel] = sum;
    }
}

// body(element, n, image, of) for all elements, up to a vector of them at a time, as above.
template <class A, class Body>
void each_of_channels(int threads, const Channels& c, const Body& body) {
  const int64_t runs = c.last ? c.batch * c.pixels : c.batch * c.channels, length = c.last ? c.channels : c.pixels;
  parallel_ranges(threads, runs, larger(1, kElementsOfShare / larger(1, length)), [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t n = i / (c.last ? c.pixels : c.channels);
      if (c.last)
        each_vector<A>(length, [&](int64_t e, int64_t count) { body(i * length + e, count, n, OfElements<A>{e, count, true}); });
      else
        each_vector<A>(length, [&](int64_t e, int64_t count) {
          body(i * length + e, count, n, OfElements<A>{i % c.channels, count, false});
        });
    }
  });
}

// y = (x * unit - mean) * factor + shift, where 1 / unit is a power of two. `minus` is -mean.
template <class A>
struct Normal {
  PerChannel<A> unit, minus, factor, shift;

  AI3_INLINE Vec<A> centered(const Channels& c, Vec<A> x, int64_t n, const OfElements<A>& of) const {
    return fma(x, of(unit.of_image(c, n)), of(minus.of_image(c, n)));
  }
  template <class T>
  void apply(int threads, const Channels& c, const T* x, T* y) const {
    each_of_channels<A>(threads, c, [&](int64_t e, int64_t count, int64_t n, const OfElements<A>& of) {
      const Vec<A> v = centered(c, load_some(x + e, count), n, of);
      store_some(y + e, fma(v, of(factor.of_image(c, n)), of(shift.of_image(c, n))), count);
    });
  }
};

}  // namespace ai3::inline AI3_LEVEL

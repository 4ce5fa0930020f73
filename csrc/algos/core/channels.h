// Sums over the pixels of each channel of each image, and what is computed of each channel with numbers of its own: the passes of
// normalizations over channels. Planes: a channel of an image is a run of memory, and its numbers fill vectors. Pixel by pixel
// (channels_last): lanes are channels; sums of a block of pixels come first, so that threads share an image.
#pragma once
#include "algorithm.h"
#include "channels_problem.h"
#include "moments.h"

namespace ai3::inline AI3_LEVEL {

inline constexpr int64_t kPixelsOfBlock = 256;     // whose sums are taken in the accumulator's type
inline constexpr int64_t kElementsOfShare = 4096;  // that are worth a thread

AI3_INLINE int64_t pixel_blocks(const Channels& c) { return ceil_div(c.pixels, kPixelsOfBlock); }
// Bytes of workspace that sum_channels takes.
template <class A>
AI3_INLINE int64_t sum_channels_bytes(const Channels& c, int outputs) {
  return c.last ? workspace_bytes<A>(checked_product({outputs, c.batch, pixel_blocks(c), c.channels})) : 0;
}

template <int n>
struct HowMany {};
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
// up to a vector of elements from `element` on, 0 beyond the last of n; `of` reads their channels' numbers. In one order,
// whatever the threads.
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
  constexpr int together = 4;  // vectors of neighbouring channels: chains of sums, and whole lines of a pixel
  constexpr int64_t span = together * width;
  const int64_t blocks = pixel_blocks(c), spans = ceil_div(c.channels, span);
  A* const partial = workspace.take<A>(outputs * c.batch * blocks * c.channels);
  const int64_t grain = larger(1, kElementsOfShare / (span * smaller(kPixelsOfBlock, larger(1, c.pixels))));
  parallel_ranges(threads, c.batch * blocks * spans, grain, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t block = i / spans, n = block / blocks, first = block % blocks * kPixelsOfBlock, channel = i % spans * span,
                    pixels = smaller(kPixelsOfBlock, c.pixels - first), count = smaller(span, c.channels - channel);
      const int64_t from = (n * c.pixels + first) * c.channels + channel;
      A* const to = partial + block * c.channels + channel;
      auto sum = [&]<int vectors>(int64_t lane, int64_t lanes, HowMany<vectors>) {
        Vec<A> sums[vectors][outputs];
        for (auto& of_one : sums)
          for (auto& s : of_one) s = Vec<A>(A(0));
        for (int64_t pixel = 0; pixel < pixels; pixel++)
#pragma GCC unroll 4
          for (int j = 0; j < vectors; j++) {
            const int64_t at = lane + j * width;
            body(sums[j], from + pixel * c.channels + at, lanes, n, OfElements<A>{channel + at, lanes, true});
          }
        for (int j = 0; j < vectors; j++)
          for (int o = 0; o < outputs; o++)
            store_some(to + o * c.batch * blocks * c.channels + lane + j * width, sums[j][o], lanes);
      };
      if (count == span) {
        sum(0, width, HowMany<together>());
        continue;
      }
      for (int64_t lane = 0; lane < count; lane += width) sum(lane, smaller(width, count - lane), HowMany<1>());
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
    using V = Vec<A>;
    constexpr int64_t width = V::width;
    auto normal = [](V v, V unit, V minus, V factor, V shift) { return fma(fma(v, unit, minus), factor, shift); };
    if (!c.last)  // a plane's numbers are read once: the compiler cannot know that y is not where they are
      return parallel_ranges(threads, c.batch * c.channels, larger(1, kElementsOfShare / larger(1, c.pixels)),
                             [&](int64_t begin, int64_t end, int) {
                               for (int64_t i = begin; i < end; i++) {
                                 const int64_t n = i / c.channels, first = i * c.pixels;
                                 const OfElements<A> of{i % c.channels, width, false};
                                 const V u = of(unit.of_image(c, n)), m = of(minus.of_image(c, n)), f = of(factor.of_image(c, n)),
                                         s = of(shift.of_image(c, n));
                                 each_vector<A>(c.pixels, [&](int64_t e, int64_t count) {
                                   store_some(y + first + e, normal(load_some(x + first + e, count), u, m, f, s), count);
                                 });
                               }
                             });
    // Pixels follow one another: with a few channels of each at a time, whose numbers would stay in registers, lines that no
    // cache held were written in parts, and took 1.4 to 1.8 times as long.
    parallel_ranges(threads, c.batch * c.pixels, larger(1, kElementsOfShare / larger(1, c.channels)),
                    [&](int64_t begin, int64_t end, int) {
                      for (int64_t i = begin, n = begin / c.pixels; i < end; n++) {
                        const A *const u = unit.of_image(c, n), *const m = minus.of_image(c, n), *const f = factor.of_image(c, n),
                                       *const s = shift.of_image(c, n);
                        for (const int64_t last = smaller(end, (n + 1) * c.pixels); i < last; i++) {
                          const T* const from = x + i * c.channels;
                          T* const to = y + i * c.channels;
                          each_vector<A>(c.channels, [&](int64_t e, int64_t count) {
                            auto of = [&](const A* numbers) { return load_some(numbers + e, count); };
                            store_some(to + e, normal(load_some(from + e, count), of(u), of(m), of(f), of(s)), count);
                          });
                        }
                      }
                    });
  }
};

}  // namespace ai3::inline AI3_LEVEL

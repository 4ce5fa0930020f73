// The sizes of normalizations over channels.
#pragma once
#include "operands.h"

namespace ai3 {

// Images of channels of pixels: one plane after another or, with `last`, pixel by pixel. Without gaps. A size of -1 is unknown.
struct Channels {
  int64_t batch, channels, pixels;
  bool last;
};
AI3_INLINE bool sizes_known(const Channels& c) { return c.batch >= 0 && c.channels >= 0 && c.pixels >= 0; }

// Of an input, and of a weight and a bias of its channels.
struct ChannelOperands {
  Operand input = {}, weight = {}, bias = {};
  Operand output = {};
  template <class T, class Body>
  AI3_INLINE void plain(const Body& body) const {
    body(input.read<T>(), weight.read<T>(), bias.read<T>(), output.write<T>());
  }
};

}  // namespace ai3

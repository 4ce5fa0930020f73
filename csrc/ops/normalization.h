// What normalizations share: checks of their weight and bias and, of those over channels, how an input lies.
#pragma once
#include "../algos/core/channels_problem.h"
#include "prepare/run.h"
#include "program/step.h"

namespace ai3::ops {

// (N, C, *) as images of channels, channels_last where ATen would answer so; single pixels lie either way.
inline Channels channels_of(const Entry& entry, const Tensor& input) {
  check(input.dim() >= 2, entry, "needs input of at least 2 dimensions, got ", input);
  const Sizes sizes = sizes_of(input);
  checked_numel(entry, sizes, 8);
  const int64_t pixels = checked_numel(entry, Sizes(sizes.begin() + 2, sizes.end()), 1);
  return {sizes[0], sizes[1], pixels, suggests_channels_last(input) || pixels == 1};
}
inline Tensor laid_as(const Tensor& t, const Channels& c) {
  return t.dim() == 4 ? dense(t, c.last && suggests_channels_last(t)) : as_contiguous(t);
}
// A weight or the like, of the input's dtype or, `wide`, float32 beside 16 bits.
inline void check_weight(const Entry& entry, const Tensor& input, const std::optional<Tensor>& t, const Sizes& sizes,
                         const char* name, bool wide) {
  if (!t) return;
  check(sizes_of(*t) == sizes, entry, "needs ", name, " of sizes ", sizes, ", got ", *t);
  const ScalarType wanted = wide ? ScalarType::Float : input.scalar_type();
  check(t->scalar_type() == wanted, entry, "needs input and ", name, " of one dtype (float32 ones beside 16 bits), got ",
        torch::headeronly::toString(input.scalar_type()), " and ", torch::headeronly::toString(t->scalar_type()));
  check(t->device() == input.device(), entry, "needs input and ", name, " on one device, got ", device_text(input), " and ",
        device_text(*t));
}
// Whether the first of them that is there is of float32 beside an input of 16 bits.
inline bool is_wide(const Tensor& input, std::initializer_list<const std::optional<Tensor>*> all) {
  const ScalarType type = input.scalar_type();
  if (type != ScalarType::BFloat16 && type != ScalarType::Half) return false;
  for (const auto* t : all)
    if (*t) return (*t)->scalar_type() == ScalarType::Float;
  return false;
}
// An element takes as long as some multiplications of a product do.
inline int32_t threads_of(const Channels& c) {
  return sizes_known(c) ? threads(checked_product({c.batch, c.channels, c.pixels, 8})) : threads();
}

// A value of a program as images, and the line's value like it.
inline Channels channels_value(program::Reader& r, const program::Value& x) {
  r.line.check(x.sizes.size() >= 2, "needs a value of at least 2 dimensions, got " + to_string(x.sizes));
  const int64_t pixels = program::count_of(Sizes(x.sizes.begin() + 2, x.sizes.end()));
  const bool image = x.sizes.size() == 4;
  image ? r.image_output(x.sizes, x.dtype) : r.rows_output(x.sizes, x.dtype);
  return {x.sizes[0], x.sizes[1], pixels, image || pixels == 1};
}

}  // namespace ai3::ops

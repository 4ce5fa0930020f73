// How tensors lie in memory: strides, memory formats, copies and new ones.
#pragma once
#include "checks.h"

namespace ai3::ops {

inline bool same_strides(const Tensor& a, const Tensor& b) {
  bool same = a.dim() == b.dim();
  for (int64_t d = 0; same && d < a.dim(); d++) same = a.size(d) == b.size(d) && (a.size(d) == 1 || a.stride(d) == b.stride(d));
  return same;
}
// Whether two tensors are the same elements of memory.
inline bool same_place(const Tensor& a, const Tensor& b) {
  return a.const_data_ptr() == b.const_data_ptr() && same_strides(a, b);
}

// What ATen's suggest_memory_format says of a 4-D tensor.
inline bool suggests_channels_last(const Tensor& t) {
  if (t.dim() != 4) return false;
  int64_t least = 0;
  if (t.stride(1) == 0) return false;
  for (int d : {1, 3, 2, 0}) {
    if (t.size(d) == 0 || t.stride(d) < least || (d == 0 && least == t.stride(1))) return false;
    least = t.stride(d) * (t.size(d) > 1 ? t.size(d) : 1);
  }
  return true;
}
AI3_INLINE Strides4 dense_strides(int64_t channels, int64_t height, int64_t width, bool channels_last) {
  return channels_last ? Strides4{channels * height * width, 1, width * channels, channels}
                       : Strides4{channels * height * width, height * width, width, 1};
}
inline bool is_dense(const Tensor& t, bool channels_last) {
  const Strides4 s = dense_strides(t.size(1), t.size(2), t.size(3), channels_last);
  const int64_t want[] = {s.n, s.c, s.h, s.w};
  for (int d = 0; d < 4; d++)
    if (t.size(d) != 1 && t.stride(d) != want[d]) return false;
  return true;
}
// t's strides where it is a slice of the channels of a larger dense tensor.
inline bool slice_strides(const Tensor& t, bool channels_last, Strides4& strides) {
  const int64_t hw = t.size(2) * t.size(3), pixel = channels_last ? t.stride(3) : 1;
  const int64_t image = channels_last ? hw * pixel : t.size(1) * hw;
  strides = {t.size(0) == 1 ? image : t.stride(0), t.stride(1), t.stride(2), t.stride(3)};
  return channels_last ? strides.c == 1 && pixel >= t.size(1) && strides.h == t.size(3) * pixel && strides.n == image
                       : strides.w == 1 && strides.h == t.size(3) && strides.c == hw && strides.n >= image;
}
// Whether a 4-D out is written as NHWC: what could be either is not.
inline bool takes_channels_last(const Tensor& out) {
  Strides4 ignored;
  return slice_strides(out, true, ignored) && !slice_strides(out, false, ignored);
}
// A copy of a 4-D t, dense in NCHW or NHWC.
Tensor copied_to(const Tensor& t, bool channels_last);
// t itself or a copy, dense in NCHW or NHWC.
inline Tensor dense(const Tensor& t, bool channels_last) { return is_dense(t, channels_last) ? t : copied_to(t, channels_last); }
inline bool is_contiguous(const Tensor& t) {
  int64_t want = 1;
  for (int64_t d = t.dim() - 1; d >= 0; d--) {
    if (t.size(d) != 1 && t.stride(d) != want) return false;
    want *= t.size(d);
  }
  return true;
}
inline Tensor as_contiguous(const Tensor& t) {
  return is_contiguous(t) ? t : t.dim() == 4 ? copied_to(t, false) : torch::stable::contiguous(t);
}

// t itself or, where it begins elsewhere, a copy that begins at a multiple of 16 bytes: CUDA's vendor libraries read so much at
// once.
inline Tensor aligned(const Tensor& t) {
  const bool begins = !t.is_cuda() || std::bit_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
  return begins ? t : torch::stable::clone(t);
}

// On the device of `like`.
Tensor empty(const Sizes& sizes, ScalarType dtype, const Tensor& like, bool channels_last = false);
// On the CPU.
Tensor empty_bytes(int64_t bytes);
// With the strides of ATen's empty_like.
Tensor empty_as(const Tensor& t);

// A dense t with the strides that `empty` gives, also in dimensions of one element, where any stride would do.
inline Tensor with_dense_strides(const Tensor& t, bool channels_last) {
  const Strides4 s = dense_strides(t.size(1), t.size(2), t.size(3), channels_last);
  if (t.stride(0) == s.n && t.stride(1) == s.c && t.stride(2) == s.h && t.stride(3) == s.w) return t;
  return call_aten("aten::as_strided", "", t, sizes_of(t), Sizes{s.n, s.c, s.h, s.w}, std::optional<int64_t>());
}

}  // namespace ai3::ops

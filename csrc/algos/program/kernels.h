// What programs (csrc/ops/program) compute between layers: passes over memory that are no operators of their own.
#pragma once
#include "../core/algorithm.h"

namespace ai3 {

// Tensors are rows of channels side by side: pixels of NHWC images, or the rows of a matrix. Rows may be parts of longer ones,
// `*_row` elements apart.
enum class MapKind : int32_t {
  activate,  // y = f(x)
  add,       // y = f(x + z)
  multiply,  // y = f(x * z)
  affine     // y = f(x * scale + shift), of each channel
};
struct MapProblem {
  DType dtype;
  int32_t threads;
  MapKind kind;
  Activation function;             // f
  int64_t images, rows, channels;  // rows of each image
  int64_t x_row, z_row, y_row;
  bool z_per_image;  // one row of z for all rows of an image; otherwise one for each
};
// y = x in another order of memory, or in another place.
struct CopyProblem {
  DType dtype;
  int32_t threads;
  int64_t batch, channels, height, width;
  Strides4 x_stride, y_stride;
};

// x (z) -> y; scale, shift and slope are of the accumulator's type, the first two null: 1 and 0. y may be x or z itself.
struct MapOperands {
  Operand input = {}, other = {}, output = {}, scale = {}, shift = {}, slope = {};
};

// One record for each level; its address is in the section `ai3_program_kernels`, for callers outside the level.
struct ProgramKernels {
  const char* level;
  void (*map)(const MapProblem&, const MapOperands&);
  void (*copy)(const CopyProblem&, const UnaryOperands&);
};

}  // namespace ai3

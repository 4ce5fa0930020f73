// A program prepared for its inputs' sizes and memory formats: every step's algorithm and problem, and where every value lies.
#pragma once
#include <memory>
#include <variant>

#include "../../algos/conv2d/problem.h"
#include "../../algos/core/pool_problem.h"
#include "../../algos/linear/problem.h"
#include "../../algos/program/kernels.h"
#include "../prepared.h"
#include "../tensors.h"
#include "text.h"

namespace ai3::ops::program {

// What a plan depends on besides the text.
struct InputLayout {
  DType dtype;
  Sizes sizes;
  int64_t row;  // elements from one pixel, or row of a matrix, to the next; 0: a contiguous NCHW image
  bool operator==(const InputLayout&) const = default;
};

// Bytes from one of the pointers of a call: the arena, the inputs, the constants, the outputs.
struct Place {
  int32_t base = -1;  // none
  int64_t offset = 0;
};

struct Step {
  std::variant<Prepared<Conv2dProblem>, Prepared<LinearProblem>, Prepared<Pool2dProblem>, MapProblem, CopyProblem> call;
  Place input, weight, bias, residual, output, scale, shift, slope, workspace;
  int64_t workspace_bytes = 0;
  // For reports.
  const Line* line = nullptr;
  Sizes sizes;  // of the output
  int64_t output_row = 0;
};

// What a constant must be, and where it lies in the tensor that holds all of them.
struct Constant {
  int64_t bytes = -1;
  uint64_t tag = 0;  // of a pack; 0 for plain elements
  int64_t offset = 0;
  bool operator==(const Constant& other) const { return bytes == other.bytes && tag == other.tag; }
};
// The tensor of constants ends in a hash of what they are, so that a call compares one number instead of each pack's tag.
inline constexpr int64_t kSealBytes = 64;
uint64_t mix_seal(uint64_t seal, int64_t bytes, uint64_t tag);

struct OutputLayout {
  Sizes sizes;
  DType dtype;
  bool channels_last;
};

struct Plan {
  Program program;
  std::vector<Step> steps;
  std::vector<Constant> constants;
  int64_t constant_bytes = 0;
  uint64_t seal = 0;
  std::vector<OutputLayout> outputs;
  int64_t arena_bytes = 0, live_bytes = 0;  // live: the most that is needed at one time, which no plan goes below
};
// Throws std::runtime_error with the line that does not fit.
std::shared_ptr<const Plan> make_plan(const std::string& text, const std::vector<InputLayout>& inputs);
// JSON, for people and for Python.
std::string describe(const Plan& plan);

}  // namespace ai3::ops::program

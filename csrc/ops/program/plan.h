// A program prepared for its inputs' sizes and memory formats: every step's call, and where every value lies.
#pragma once
#include <array>
#include <memory>

#include "../../algos/core/algorithm.h"
#include "../prepare/packs.h"
#include "../prepare/prepared.h"
#include "text.h"

namespace ai3::ops::program {

// What a plan depends on besides the text.
struct InputLayout {
  DType dtype;
  Sizes sizes;
  int64_t row;  // elements from one pixel, or row of a matrix, to the next; 0: a contiguous tensor of four dimensions
  bool operator==(const InputLayout&) const = default;
};

// Bytes from one of the pointers of a call: the arena, the inputs, the constants, the outputs.
struct Place {
  int32_t base = -1;  // none
  int64_t offset = 0;
};

inline constexpr int kRolesAtMost = 16;
using StepFunction = void (*)(const void* call, const Operand* operands, Workspace& memory);
// One kernel's call.
struct Call {
  std::shared_ptr<const void> prepared;
  StepFunction run;
  const Entry* entry;  // null: a pass over memory
  std::array<Place, kRolesAtMost> operands;
  size_t count;
  int64_t workspace_bytes;
  Place workspace;
  // For reports.
  const Line* line;
  Sizes sizes;  // of the output
  int64_t output_row;
  Place input, output;
  bool copies;
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
  std::vector<Call> steps;
  std::vector<Constant> constants;
  int64_t constant_bytes = 0;
  uint64_t seal = 0;
  std::vector<OutputLayout> outputs;
  int64_t arena_bytes = 0, live_bytes = 0;  // live: the most that is needed at one time, which no plan goes below
};
// Throws std::runtime_error with the line that does not fit.
std::shared_ptr<const Plan> make_plan(const std::string& text, const std::vector<InputLayout>& inputs, Where where);
// JSON, for people and for Python.
std::string describe(const Plan& plan);

}  // namespace ai3::ops::program

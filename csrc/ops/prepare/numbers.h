// The numbers of calls for inference: all arguments that are not tensors, which their owner, a plan of Python's, hands over once
// as text. A call then names them by one integer (docs/decisions/calls.md).
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace ai3::ops {

struct Number {
  enum class Kind : uint8_t { none, whole, real } kind;
  int64_t whole;
  double real;  // also of a whole one
};
struct Numbers {
  std::string text;  // decimal numbers between spaces, "-" for None
  std::vector<Number> list;
};

// Those that were kept under `id`, and that their owner has not let go.
std::shared_ptr<const Numbers> numbers_known(int64_t id);

}  // namespace ai3::ops

// The tensors of a call, by role. Each operation's problem.h has a struct of nothing but `Operand`s, whose names are the roles:
// kernels say m.weight, and what serves every operation (programs, prepared calls) takes the same struct as a list.
#pragma once
#include <cstdint>

#include "dtype.h"

namespace ai3 {

// One tensor; `data` is null where it is absent or not wanted. How it lies in memory stands in the problem where the operation's
// has strides or needs none; else `sizes` and `strides`, in elements and `rank` of each, say it, in the caller's memory.
struct Operand {
  void* data = nullptr;
  const int64_t *sizes = nullptr, *strides = nullptr;
  int32_t rank = 0;
  DType dtype = DType::f32;  // where it may differ from the problem's

  constexpr Operand() = default;
  AI3_INLINE constexpr Operand(const void* memory) : data(const_cast<void*>(memory)) {}  // NOLINT: a pointer is an operand
  AI3_INLINE explicit operator bool() const { return data != nullptr; }
  template <class T>
  AI3_INLINE const T* read() const {
    return static_cast<const T*>(data);
  }
  template <class T>
  AI3_INLINE T* write() const {
    return static_cast<T*>(data);
  }
};

// How many operands a struct of them has.
template <class Operands>
inline constexpr int kOperandsIn = static_cast<int>(sizeof(Operands) / sizeof(Operand));

// Of operations that make one tensor of one, and their gradients. `plain` hands over what a kernel of the short form takes.
struct UnaryOperands {
  Operand input = {}, output = {};
  template <class T, class Body>
  AI3_INLINE void plain(const Body& body) const {
    body(input.read<T>(), output.write<T>());
  }
};
struct UnaryGradients {
  Operand grad_output = {}, input = {}, output = {};
  Operand grad_input = {};
};
// Gradients of operations with a weight and a bias. They are laid out as what they are gradients of.
struct WeightedGradients {
  Operand grad_output = {}, input = {}, weight = {};
  Operand grad_input = {}, grad_weight = {}, grad_bias = {};
};

// An algorithm's own parameters, in the order of Traits::parameters: what a problem has beside its operation's. A number as it
// is, a float's bits (`real`), true or false, a word's place among those that are allowed.
struct Parameters {
  static constexpr int kAtMost = 9;
  int64_t values[kAtMost] = {};
  AI3_INLINE constexpr int64_t whole(int i) const { return values[i]; }
  AI3_INLINE constexpr bool flag(int i) const { return values[i] != 0; }
  AI3_INLINE double real(int i) const {
    double value;
    __builtin_memcpy(&value, &values[i], sizeof(value));
    return value;
  }
};

}  // namespace ai3

// The arguments of a boxed call: from the stack and back.
#pragma once
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <bit>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../dispatch/registry.h"
#include "../prepare/numbers.h"
#include "stable.h"

namespace ai3::ops {

using torch::headeronly::MemoryFormat;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Sizes = std::vector<int64_t>;

// Takes the arguments of a boxed call off the stack, in order. Each must be taken, also when a later one is refused: the stack
// owns references. In a call for inference all that are not tensors are one integer, which names the numbers: PyTorch takes 0.1
// us to hand over a number and 0.6 us for a list (docs/decisions/calls.md).
//
// As long as they live, the first tensor's device is the current one: where memory comes from, kernels are launched, and the
// vendor's libraries keep their state.
class Arguments {
 public:
  explicit Arguments(StableIValue* stack, bool inference = false) : next_(stack), inference_(inference) {}
  template <class T>
  T take() {
    constexpr bool whole = std::is_same_v<T, int64_t> || std::is_same_v<T, bool> || std::is_same_v<T, std::optional<int64_t>>;
    if constexpr (whole || std::is_same_v<T, double>)
      if (inference_) {
        const Number& number = take_number();
        if (number.kind == Number::Kind::none) return T();
        if constexpr (std::is_same_v<T, double>) return number.real;
        if (number.kind == Number::Kind::whole) return T(number.whole);
        wrong_numbers();
      }
    T value = from_stack<T>(*next_++);
    if constexpr (std::is_same_v<T, Tensor>) set_device(value);
    return value;
  }
  // What follows the numbers in a call for inference.
  template <class T>
  T take_from_stack() {
    return from_stack<T>(*next_++);
  }
  Sizes take_list(size_t length) {
    if (!inference_) return take<Sizes>();
    Sizes list(length);
    for (int64_t& value : list) value = take<int64_t>();
    return list;
  }
  // The algorithm's own parameters, which come last; tensors among them go to `tensors`, at their places.
  using Own = std::array<std::optional<Tensor>, Parameters::kAtMost>;
  Parameters take_parameters(const Entry& entry, Own* tensors = nullptr) {
    Parameters all;
    for (size_t i = 0; i < entry.parameters.size(); i++) {
      const Parameter& p = entry.parameters[i];
      int64_t& to = all.values[i];
      switch (p.kind) {
        case Parameter::Kind::whole: to = take<int64_t>(); break;
        case Parameter::Kind::flag: to = take<bool>(); break;
        case Parameter::Kind::real: to = std::bit_cast<int64_t>(take<double>()); break;
        case Parameter::Kind::word: to = inference_ ? take<int64_t>() : word_of(p, take<std::string>()); break;
        case Parameter::Kind::tensor: to = 1, tensors->at(i) = take<Tensor>(); break;
        case Parameter::Kind::optional_tensor: to = (tensors->at(i) = take<std::optional<Tensor>>()).has_value(); break;
      }
    }
    return all;
  }
  // A list of any length, which among the numbers comes before it.
  Sizes take_list() {
    if (!inference_) return take<Sizes>();
    const int64_t length = take<int64_t>();
    if (length < 0 || length > 64) throw std::runtime_error("needs a list of at most 64 numbers, got " + std::to_string(length));
    return take_list(static_cast<size_t>(length));
  }

 private:
  void set_device(const Tensor& t) {
    if (std::exchange(has_device_, true) || !t.defined() || !t.is_cuda()) return;
    device_.emplace(t.get_device_index());
  }
  const Number& take_number() {
    if (!numbers_) numbers_ = numbers_known(from_stack<int64_t>(*next_++));
    if (taken_ == numbers_->list.size()) wrong_numbers();
    return numbers_->list[taken_++];
  }
  [[noreturn, gnu::noinline, gnu::cold]] void wrong_numbers() const {
    throw std::runtime_error("needs as many numbers as it has arguments, got '" + numbers_->text + "'");
  }

  StableIValue* next_;
  bool inference_;
  bool has_device_ = false;
  std::optional<torch::stable::accelerator::DeviceGuard> device_;
  std::shared_ptr<const Numbers> numbers_;
  size_t taken_ = 0;
};
template <class T>
void give(StableIValue* stack, int i, const T& value) {
  stack[i] = to_stack(value);
}

// Calls an operator of PyTorch's; `arguments` are converted in order. The stack holds the results.
template <class... A>
auto call_dispatcher(const char* name, const char* overload, const A&... arguments) {
  std::array<StableIValue, sizeof...(A)> stack{to_stack(arguments)...};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, overload, stack.data(), TORCH_ABI_VERSION));
  return stack;
}
// The same for one result.
template <class... A>
Tensor call_aten(const char* name, const char* overload, const A&... arguments) {
  return from_stack<Tensor>(call_dispatcher(name, overload, arguments...)[0]);
}

}  // namespace ai3::ops

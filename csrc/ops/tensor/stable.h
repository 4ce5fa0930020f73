// The one place for what PyTorch's stable ABI has in its namespace `detail`: values on a boxed call's stack, and libraries of
// operators that are made at run time.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

namespace ai3::ops {

using torch::stable::detail::StableLibrary;

// A value as the stack holds it; one that is taken off owns its reference.
template <class T>
StableIValue to_stack(const T& value) {
  return torch::stable::detail::from(value);
}
template <class T>
T from_stack(StableIValue value) {
  return torch::stable::detail::to<T>(value);
}

}  // namespace ai3::ops

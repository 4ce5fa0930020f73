// Checks of arguments, whose errors name the operator, what it got and what it needs.
#pragma once
#include <span>
#include <sstream>

#include "arguments.h"

namespace ai3::ops {

inline std::string to_string(std::span<const int64_t> sizes) {
  std::string s = "(";
  for (size_t i = 0; i < sizes.size(); i++) s += (i ? ", " : "") + std::to_string(sizes[i]);
  return s + (sizes.size() == 1 ? ",)" : ")");
}
// As long as the tensor has them.
inline std::span<const int64_t> view_of_sizes(const Tensor& t) {
  const auto sizes = t.sizes();
  return {sizes.data(), sizes.size()};
}
inline Sizes sizes_of(const Tensor& t) { return Sizes(t.sizes().begin(), t.sizes().end()); }

// Throws "ai3::<operation>_<algorithm>: " and the parts. Only here are they made into words: most calls are right.
inline std::string words(const Sizes& sizes) { return to_string(sizes); }
inline std::string words(std::span<const int64_t> sizes) { return to_string(sizes); }
inline std::string words(const Tensor& t) { return to_string(sizes_of(t)); }
template <class T>
const T& words(const T& part) {
  return part;
}
template <class... Parts>
[[noreturn, gnu::noinline, gnu::cold]] void fail(const Entry& entry, const Parts&... parts) {
  std::ostringstream s;
  s << "ai3::" << entry.operation->name << "_" << entry.name << ": ";
  (s << ... << words(parts));
  throw std::runtime_error(s.str());
}
template <class... Parts>
void check(bool ok, const Entry& entry, const Parts&... parts) {
  if (!ok) [[unlikely]]
    fail(entry, parts...);
}

// For operators that know no gradients, once their arguments are taken.
inline void check_inference(const Entry& entry) {
  check(!aoti_torch_grad_mode_is_enabled(), entry, "_infer is for inference: call it without gradients");
}

// The dtype of kernels, if they compute in it.
inline std::optional<DType> known_dtype(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Double: return DType::f64;
    case ScalarType::Float: return DType::f32;
    case ScalarType::BFloat16: return DType::bf16;
    case ScalarType::Half: return DType::f16;
    default: return std::nullopt;
  }
}
inline DType dtype_of(const Entry& entry, const Tensor& t) {
  check(t.defined(), entry, "needs a tensor, got None");
  if (const auto dtype = known_dtype(t)) return *dtype;
  fail(entry, "needs float64, float32, bfloat16 or float16 tensors, got ", torch::headeronly::toString(t.scalar_type()));
}
inline Device device_of(const Entry& entry, const Tensor& t) {
  if (t.is_cpu()) return Device::cpu;
  if (t.is_cuda()) return Device::cuda;
  fail(entry, "needs CPU or CUDA tensors, got one of sizes ", t, " on another device");
}
inline std::string device_text(const Tensor& t) {
  return t.is_cpu() ? "cpu" : t.is_cuda() ? "cuda:" + std::to_string(t.get_device_index()) : "neither CPU nor CUDA";
}
inline void check_same(const Entry& entry, const Tensor& input, const Tensor& other, const char* name) {
  check(input.defined() && other.defined(), entry, "needs tensors as input and ", name, ", got None");
  check(other.scalar_type() == input.scalar_type(), entry, "needs input and ", name, " of one dtype, got ",
        torch::headeronly::toString(input.scalar_type()), " and ", torch::headeronly::toString(other.scalar_type()));
  check(other.device() == input.device(), entry, "needs input and ", name, " on one device, got ", device_text(input), " and ",
        device_text(other));
}

// A list argument for `count` dimensions: one element stands for all of them, as in ATen.
inline void spread(const Entry& entry, Sizes& list, size_t count, const char* name) {
  if (list.size() == 1) list.resize(count, list[0]);
  check(list.size() == count, entry, name, " needs 1 or ", count, " elements, got ", list);
}
inline void check_each(const Entry& entry, const Sizes& list, int64_t least, const char* name) {
  for (int64_t v : list)
    check(v >= least && v <= INT32_MAX, entry, name, " needs values from ", least, " to ", INT32_MAX, ", got ", list);
}

// Refuses an `out` that shares memory with what is read: a kernel reads after it has begun to write. Gaps between elements count
// as theirs, unless both lie in slices, such as other channels, of what repeats with one period.
void check_apart(const Entry& entry, const Tensor& out, const Tensor& other, const char* name, const char* written = "an out");
// Refuses an `out` or a residual of other sizes than the output's, or of another dtype or device than the input's.
void check_place(const Entry& entry, const Tensor& input, const Tensor& t, const Sizes& sizes, const char* name);
// The workspace that a caller gave: refuses memory that none can lie in, or that shares some with what is read or written. That
// it is large enough, with_workspace checks.
struct Named {
  const Tensor* tensor;
  const char* name;
};
void check_workspace(const Entry& entry, const std::optional<Tensor>& workspace, std::initializer_list<Named> others);
// Raises out's version, as PyTorch's in-place operators do, and refuses what they refuse: an inference tensor outside of
// inference mode. To be called before out is written.
void mark_written(const Entry& entry, const Tensor& out);

inline int64_t checked_numel(const Entry& entry, const Sizes& sizes, int64_t element_size) {
  int64_t n = element_size;
  for (int64_t s : sizes) n = checked_mul(n, s);
  check(n != kOverflow, entry, "a tensor of sizes ", sizes, " is too large");
  return n / element_size;
}

// The same for the sizes of a query, of which -1 is unknown.
void check_numel(std::initializer_list<int64_t> sizes);
// The window's numbers in a query, within what check_each lets pass.
void check_each(std::initializer_list<int64_t> numbers);

// The activation of that name, if there is one.
std::optional<Activation> activation_called(const std::string& word);
// The word of a packed operator's `activation` argument.
Activation activation_named(const Entry& entry, const std::string& word);

}  // namespace ai3::ops

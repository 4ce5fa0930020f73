// Sizes, what shares memory, names of activations.
#include "checks.h"

#include <algorithm>

#include "layout.h"

namespace ai3::ops {

void check_numel(std::initializer_list<int64_t> sizes) {
  int64_t bytes = 8;
  for (int64_t s : sizes) bytes = checked_mul(bytes, std::max<int64_t>(s, 1));
  if (bytes == kOverflow) throw std::runtime_error("a tensor of sizes " + to_string(Sizes(sizes)) + " is too large");
}
void check_each(std::initializer_list<int64_t> numbers) {
  for (int64_t n : numbers)
    if (n < -1 || n > INT32_MAX)
      throw std::runtime_error("needs values up to " + std::to_string(INT32_MAX) + ", got " + std::to_string(n));
}

namespace {

// Where a tensor's elements are, in bytes from its first one.
struct Extent {
  const char* first;
  int64_t last;  // of the last element
  int64_t rest;  // the same, of dimensions whose stride is no multiple of the period
};
Extent extent_of(const Tensor& t, int64_t period) {
  Extent e{static_cast<const char*>(t.const_data_ptr()), 0, 0};
  for (int64_t d = 0; d < t.dim(); d++) {
    const int64_t bytes = (t.size(d) - 1) * t.stride(d) * static_cast<int64_t>(t.element_size());
    e.last += bytes;
    if (t.stride(d) * static_cast<int64_t>(t.element_size()) % period) e.rest += bytes;
  }
  return e;
}

}  // namespace

void check_apart(const Entry& entry, const Tensor& out, const Tensor& other, const char* name, const char* written) {
  if (out.numel() == 0 || other.numel() == 0) return;
  const int64_t size = static_cast<int64_t>(out.element_size()), other_size = static_cast<int64_t>(other.element_size());
  const Extent a = extent_of(out, 1), b = extent_of(other, 1);
  bool apart = a.first + a.last + size <= b.first || b.first + b.last + other_size <= a.first;
  for (int64_t d = 0; d < out.dim() && !apart; d++) {
    const int64_t period = out.stride(d) * size;
    if (out.size(d) == 1 || period == 0) continue;
    const Extent x = extent_of(out, period), y = extent_of(other, period);
    const int64_t shift = ((x.first - y.first) % period + period) % period;
    apart = shift >= y.rest + other_size && shift + x.rest + size <= period;
  }
  check(apart, entry, "needs ", written, " that shares no memory with ", name);
}

void check_workspace(const Entry& entry, const std::optional<Tensor>& workspace, std::initializer_list<Named> others) {
  if (!workspace) return;
  const Tensor& w = *workspace;
  for (const Named& other : others) {
    if (!other.tensor) continue;
    check(w.device() == other.tensor->device(), entry, "needs a workspace on the device of ", other.name, ", got ",
          device_text(w), " and ", device_text(*other.tensor));
    check_apart(entry, w, *other.tensor, other.name, "a workspace");
  }
  check(w.scalar_type() == ScalarType::Byte && is_contiguous(w), entry, "needs a contiguous uint8 tensor as workspace, got ",
        torch::headeronly::toString(w.scalar_type()), " of sizes ", w);
  const uintptr_t alignment = w.is_cuda() ? 256 : 64;  // cuBLAS's
  check(std::bit_cast<uintptr_t>(w.const_data_ptr()) % alignment == 0, entry, "needs a workspace that begins at a multiple of ",
        alignment, " bytes");
}

void check_place(const Entry& entry, const Tensor& input, const Tensor& t, const Sizes& sizes, const char* name) {
  check_same(entry, input, t, name);
  check(sizes_of(t) == sizes, entry, "needs ", name, " of sizes ", sizes, ", got ", t);
}
void mark_written(const Entry& entry, const Tensor& out) {
  check(out.defined(), entry, "needs a tensor as out, got None");
  call_aten("aten::transpose_", "", out, int64_t{0}, int64_t{0});  // changes nothing else
}

namespace {
constexpr const char* kActivations[] = {"none",        "relu", "relu6",     "hardswish", "silu", "gelu",      "sigmoid",
                                        "hardsigmoid", "tanh", "gelu_tanh", "prelu",     "elu",  "leaky_relu"};
}
std::optional<Activation> activation_called(const std::string& word) {
  if (word == "leaky_relu") return Activation::prelu;
  for (size_t i = 0; i < std::size(kActivations); i++)
    if (word == kActivations[i]) return static_cast<Activation>(i);
  return std::nullopt;
}
std::string activations_in(uint32_t bits, const char* between) {
  std::string names;
  for (size_t i = 1; i < std::size(kActivations); i++) {
    const auto activation = *activation_called(kActivations[i]);
    if (bits & activation_bit(activation)) names += (names.empty() ? "" : between) + std::string(kActivations[i]);
  }
  return names;
}
Activation activation_named(const Entry& entry, const std::string& word) {
  if (const std::optional<Activation> found = activation_called(word)) return *found;
  std::string known;
  for (const char* name : kActivations) known += (known.empty() ? "" : ", ") + std::string(name);
  fail(entry, "needs an activation of ", known, ", got '", word, "'");
}

}  // namespace ai3::ops

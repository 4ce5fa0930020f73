// An algorithm run on a problem, with guard pages around all that it may touch.
#pragma once
#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <string>
#include <vector>

#include "problems.h"
#include "reference.h"
#include "support.h"

// After what they add to (tests/cpp/CMakeLists.txt writes it).
#include "operations.h"

namespace ai3 {

// Whether the kernels of a level were compiled for a dtype.
inline bool is_compiled(const std::string& level, DType dtype) {
  return dtype == DType::f32 || level == "cuda" || (level != "counting" && !AI3_KERNELS_OF_FLOAT32);
}

inline void put(DType t, void* data, int64_t i, double v) {
  with_type(t, [&]<class T>() { static_cast<T*>(data)[i] = narrowed<T>(static_cast<Acc<T>>(v)); });
}
inline double get(DType t, const void* data, int64_t i) {
  return with_type(t, [&]<class T>() { return static_cast<double>(widen(static_cast<const T*>(data)[i])); });
}

enum class Values { integers, reals };

// Values drawn once, of which each tensor takes a stretch: drawing them anew took longer than most kernels. A prime number of
// them, so that no size of a problem repeats them in step.
inline const std::vector<double>& drawn(Values values) {
  static const auto draw = [](Values which) {
    std::mt19937 random(1);
    std::uniform_int_distribution<int> integer(-3, 3);
    std::normal_distribution<double> real;
    std::vector<double> result(65521);
    for (double& v : result) v = which == Values::integers ? integer(random) : real(random);
    return result;
  };
  static const std::vector<double> integers = draw(Values::integers), reals = draw(Values::reals);
  return values == Values::integers ? integers : reals;
}

// Elements of a tensor, as stored and in float64. None when `count` is 0: then the kernel gets a null pointer.
struct Data {
  Data(DType t, int64_t count, Flush flush, Values values, size_t seed) : doubles(count) {
    if (count == 0) return;
    memory = std::make_unique<Guarded>(count * size_of(t), flush);
    const std::vector<double>& from = drawn(values);
    size_t next = seed * 7919 % from.size();
    with_type(t, [&]<class T>() {
      T* stored = memory->as<T>();
      for (int64_t i = 0; i < count; i++) {
        stored[i] = narrowed<T>(static_cast<Acc<T>>(from[next]));
        doubles[i] = static_cast<double>(widen(stored[i]));
        if (++next == from.size()) next = 0;
      }
    });
    memory->protect();
  }
  const void* stored() const { return memory ? memory->as<char>() : nullptr; }
  const double* values() const { return memory ? doubles.data() : nullptr; }
  std::unique_ptr<Guarded> memory;
  std::vector<double> doubles;
};

// How a problem is run: at which end of the buffers the guard pages lie, on what data.
struct Way {
  Flush flush;
  Values values;
};

// The tensors that a problem reads.
template <class P>
struct Inputs {
  Inputs(const P& p, const Way& way)
      : x(p.dtype, extent(p).input, way.flush, way.values, 1),
        weight(weight_type(p), extent(p).weight, way.flush, way.values, 2),
        bias(weight_type(p), extent(p).bias, way.flush, way.values, 3),
        residual(p.dtype, has_residual(p) ? extent(p).output : 0, way.flush, way.values, 4),
        scale(p.dtype == DType::f64 ? DType::f64 : DType::f32, prologue_channels(p), way.flush, way.values, 5),
        shift(p.dtype == DType::f64 ? DType::f64 : DType::f32, prologue_channels(p), way.flush, way.values, 6),
        slope(p.dtype == DType::f64 ? DType::f64 : DType::f32, sloped_channels(p), way.flush, way.values, 7) {}
  static DType weight_type(const P& p) {
    if constexpr (requires { p.wide_weight; })
      if (p.wide_weight) return DType::f32;
    return p.dtype;
  }
  static bool has_residual(const P& p) {
    if constexpr (requires { p.has_residual; }) return p.has_residual;
    return false;
  }
  static int64_t prologue_channels(const P& p) {
    if constexpr (requires { p.has_prologue; }) return p.has_prologue ? p.in_channels : 0;
    return 0;
  }
  static int64_t sloped_channels(const P& p) {
    if constexpr (requires { p.activation; })
      if (has_slope(p.activation)) {
        if constexpr (requires { p.out_channels; }) return p.out_channels;
        if constexpr (requires { p.out_features; }) return p.out_features;
      }
    return 0;
  }
  // What is convolved: x, or what its prologue makes of it.
  std::vector<double> convolved(const P& p) const {
    std::vector<double> values = x.doubles;
    if constexpr (requires { p.has_prologue; })
      for (size_t i = 0; p.has_prologue && i < values.size(); i++) {
        const int64_t at = static_cast<int64_t>(i), c = at / p.x_stride.c % p.in_channels;
        values[i] = values[i] * scale.doubles[c] + shift.doubles[c];
        if (p.input_relu && values[i] < 0) values[i] = 0;
      }
    return values;
  }
  Data x, weight, bias, residual, scale, shift, slope;
};

// Multiples in which an algorithm takes memory, which so stays aligned.
template <class P>
int64_t piece_of(const Algorithm<P>& a) {
  return std::string(a.info.level) == "cuda" ? 256 : 64;
}

// Packs a weight, with a workspace of its own.
template <class P>
void pack(const Algorithm<P>& a, const P& p, const void* weight, void* packed, Flush flush) {
  const int64_t bytes = a.traits.pack_workspace ? a.traits.pack_workspace(p) : 0;
  const Guarded scratch(bytes, flush);
  Workspace workspace{scratch.as<char>(), bytes, 0, nullptr};
  a.traits.pack(p, weight, packed, workspace);
}

// Runs an algorithm, with output, workspace and packed weights of its own; `span` elements of output, from the first to the last.
// `onto_residual`: the residual lies in the output.
template <class P>
Guarded run(const Algorithm<P>& a, const P& p, const Inputs<P>& in, Flush flush, int64_t span, bool onto_residual = false) {
  Guarded y(span * size_of(p.dtype), flush);
  if (onto_residual) std::memcpy(y.as<char>(), in.residual.stored(), static_cast<size_t>(span * size_of(p.dtype)));
  const int64_t bytes = a.traits.workspace ? a.traits.workspace(p) : 0, piece = piece_of(a);
  EXPECT_EQ(bytes % piece, 0) << "workspace is taken in multiples of " << piece << " bytes";
  const int64_t pack_bytes = a.traits.packed_bytes ? a.traits.packed_bytes(p) : 0;
  const Guarded scratch(bytes, flush), packed(round_up(pack_bytes, piece), flush);
  if (pack_bytes > 0) {
    pack(a, p, in.weight.stored(), packed.as<char>(), flush);
    packed.protect();
  }
  Workspace workspace{scratch.as<char>(), bytes, 0, nullptr};
  typename P::Operands m;
  m.output = y.as<char>();
  if constexpr (requires { m.query; })
    m.query = in.x.stored(), m.key = in.weight.stored(), m.value = in.bias.stored();
  else
    m.input = in.x.stored();
  if constexpr (requires { m.weight; }) m.weight = pack_bytes > 0 ? packed.as<char>() : in.weight.stored();
  if constexpr (requires { m.bias; }) m.bias = in.bias.stored();
  if constexpr (requires { m.residual; })
    m.residual = onto_residual ? y.as<char>() : in.residual.stored(), m.slope = in.slope.stored();
  if constexpr (requires { m.scale; }) m.scale = in.scale.stored(), m.shift = in.shift.stored();
  if constexpr (requires { m.mean; }) m.mean = in.bias.stored(), m.variance = in.weight.stored();
  a.run(p, m, workspace);
  return y;
}

// Runs an algorithm's kernel for the gradient of the input, or of weight and bias. The stored elements of the latter two.
template <class P>
std::vector<char> run_backward(const Algorithm<P>& a, P p, const Inputs<P>& in, const Data& grad, bool of_weight, Flush flush) {
  if constexpr (requires { p.has_bias; }) p.has_bias = true;
  const Extent count = extent(p);
  const int64_t of_a_weight = size_of(Inputs<P>::weight_type(p));
  const int64_t bytes_of_gradient = of_weight ? count.weight * of_a_weight : count.input * size_of(p.dtype),
                bytes_of_bias = of_weight ? count.bias * of_a_weight : 0;
  const Guarded gradient(bytes_of_gradient, flush), bias(bytes_of_bias, flush);
  if constexpr (requires { p.has_bias; }) p.has_bias = false;
  typename P::Gradients m;
  m.grad_output = grad.stored(), m.input = in.x.stored();
  if constexpr (requires { m.weight; }) {
    m.weight = in.weight.stored();
    (of_weight ? m.grad_weight : m.grad_input) = gradient.as<char>();
    if (of_weight) m.grad_bias = bias.as<char>();
  }
  if constexpr (requires { m.mean; }) m.mean = in.bias.stored(), m.variance = in.weight.stored();
  const int64_t bytes = a.traits.backward_workspace ? a.traits.backward_workspace(p, m) : 0;
  EXPECT_EQ(bytes % piece_of(a), 0) << "workspace is taken in multiples of " << piece_of(a) << " bytes";
  const Guarded scratch(bytes, flush);
  Workspace workspace{scratch.as<char>(), bytes, 0, nullptr};
  a.traits.backward(p, m, workspace);
  std::vector<char> result(gradient.as<char>(), gradient.as<char>() + bytes_of_gradient);
  result.insert(result.end(), bias.as<char>(), bias.as<char>() + bytes_of_bias);
  return result;
}
// Whether it has a kernel for the gradient of input or weight: then it names itself for it.
template <class P>
bool has_backward(const Algorithm<P>& a, const P& p, bool of_weight) {
  if (!a.traits.backward) return false;
  const GradientNames names = a.traits.gradients(p);
  const char* name = of_weight ? names.weight : names.input;
  return name && std::string(name) == a.info.name;
}

template <class P>
bool supported(const Algorithm<P>& a, const P& p, Reason& reason) {
  return (a.traits.dtypes & dtype_bit(p.dtype)) && (!a.traits.supports || a.traits.supports(p, reason));
}

// Whether the kernel takes the problem's layout; the glue converts for those that do not.
template <class P>
bool usable_layout(const Algorithm<P>& a, const P& p) {
  if constexpr (requires { p.x_stride; })
    return a.traits.layout == Layout::any || (a.traits.layout == Layout::nhwc) == (p.x_stride.c == 1);
  return true;
}

template <class P>
std::string describe(const Algorithm<P>& a, const P& p) {
  return std::string(a.info.level) + " " + a.info.operation + "_" + a.info.name + " " + name_of(p.dtype) + " " +
         problems::describe(p) + " on " + std::to_string(p.threads) + " threads";
}

// body(algorithm) for each algorithm with a kernel, of each level that this machine runs.
template <class Body>
void each_kernel(const Body& body) {
  auto visit = [&]<class P>(const AlgorithmInfo& info, P*) {
    const auto& a = reinterpret_cast<const Algorithm<P>&>(info);
    if (a.run) body(a);
  };
  for (auto a = __start_ai3_algorithms; a != __stop_ai3_algorithms; a++) {
    if (!usable((*a)->level)) continue;
    const std::string operation = (*a)->operation;
#define AI3_VISIT(name) \
  if (operation == #name) visit(**a, static_cast<problem_of::name*>(nullptr));
    AI3_OPERATIONS(AI3_VISIT)
#undef AI3_VISIT
  }
}
template <class P>
std::string test_name(const Algorithm<P>& a) {
  return std::string(a.info.level) + "_" + a.info.operation + "_" + a.info.name;
}

}  // namespace ai3

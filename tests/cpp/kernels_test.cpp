// Every algorithm of every level against the reference, with guard pages around all that it may touch.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "problems.h"
#include "reference.h"
#include "support.h"

namespace {
using namespace ai3;

constexpr double unit_roundoff(DType t) {
  return t == DType::f64 ? 0x1p-53 : t == DType::f32 ? 0x1p-24 : t == DType::bf16 ? 0x1p-8 : 0x1p-11;
}
constexpr DType accumulator(DType t) { return t == DType::f64 ? DType::f64 : DType::f32; }

void put(DType t, void* data, int64_t i, double v) {
  with_type(t, [&]<class T>() { static_cast<T*>(data)[i] = narrowed<T>(static_cast<Acc<T>>(v)); });
}
double get(DType t, const void* data, int64_t i) {
  return with_type(t, [&]<class T>() { return static_cast<double>(widen(static_cast<const T*>(data)[i])); });
}
double rounded(DType t, double v) {
  char stored[8];
  put(t, stored, 0, v);
  return get(t, stored, 0);
}

enum class Values { integers, reals };

// Elements of a tensor, as stored and in float64. None when `count` is 0: then the kernel gets a null pointer.
struct Data {
  Data(DType t, int64_t count, Flush flush, Values values, unsigned seed) : doubles(count) {
    if (count == 0) return;
    memory = std::make_unique<Guarded>(count * size_of(t), flush);
    std::mt19937 random(seed);
    std::uniform_int_distribution<int> integer(-3, 3);
    std::normal_distribution<double> real;
    for (int64_t i = 0; i < count; i++) {
      put(t, memory->as<char>(), i, values == Values::integers ? integer(random) : real(random));
      doubles[i] = get(t, memory->as<char>(), i);
    }
    memory->protect();
  }
  const void* stored() const { return memory ? memory->as<char>() : nullptr; }
  const double* values() const { return memory ? doubles.data() : nullptr; }
  std::unique_ptr<Guarded> memory;
  std::vector<double> doubles;
};

template <class P>
bool supported(const Algorithm<P>& a, const P& p, Reason& reason) {
  return (a.traits.dtypes & dtype_bit(p.dtype)) && (!a.traits.supports || a.traits.supports(p, reason));
}

// How a problem is run: at which end of the buffers the guard pages lie, on what data.
struct Way {
  Flush flush;
  Values values;
};

template <class P>
std::vector<double> run(const Algorithm<P>& a, const P& p, const Way& way, Reference& expected) {
  const Extent e = extent(p);
  const Data x(p.dtype, e.input, way.flush, way.values, 1), w(p.dtype, e.weight, way.flush, way.values, 2),
      b(p.dtype, e.bias, way.flush, way.values, 3);
  bool with_residual = false;
  if constexpr (requires { p.has_residual; }) with_residual = p.has_residual;
  const Data residual(p.dtype, with_residual ? e.output : 0, way.flush, way.values, 4);
  expected = reference(a.info.operation, p, x.values(), w.values(), b.values(), residual.values());

  const Guarded y(e.output * size_of(p.dtype), way.flush);
  const int64_t bytes = a.traits.workspace ? a.traits.workspace(p) : 0;
  EXPECT_EQ(bytes % 64, 0) << "workspace is taken in multiples of 64 bytes";
  const Guarded scratch(bytes, way.flush);
  const int64_t packed_bytes = a.traits.packed_bytes ? round_up(a.traits.packed_bytes(p), 64) : 0;
  const Guarded packed(packed_bytes, way.flush);
  if (a.traits.pack) {
    a.traits.pack(p, w.stored(), packed.as<char>());
    packed.protect();
  }
  Workspace workspace{scratch.as<char>(), bytes, 0, nullptr};
  a.run(p, {x.stored(), a.traits.pack ? packed.as<char>() : w.stored(), b.stored(), residual.stored(), y.as<char>()}, workspace);
  std::vector<double> result(e.output);
  for (int64_t i = 0; i < e.output; i++) result[i] = get(p.dtype, y.as<char>(), i);
  return result;
}

template <class P>
bool activates(const P& p) {
  if constexpr (requires { p.activation; }) return p.activation > Activation::relu6;
  return false;
}

// The bounds of the accuracy classes, see DESIGN on accuracy: sums of small integers have no rounding but the last.
template <class P>
void compare(const Algorithm<P>& a, const P& p, Values values, const std::vector<double>& y, const Reference& expected) {
  const double u = unit_roundoff(p.dtype), v = unit_roundoff(accumulator(p.dtype)), terms = static_cast<double>(extent(p).terms);
  const bool averages = std::string(a.info.operation).find("avg") != std::string::npos;
  const bool bitwise = a.traits.accuracy == Accuracy::exact && values == Values::integers && !averages && !activates(p);
  double largest = 0;
  for (double e : expected.y) largest = std::fmax(largest, std::fabs(e));
  for (size_t i = 0; i < y.size(); i++) {
    double bound = 0;
    const double exact = bitwise ? rounded(p.dtype, expected.y[i]) : expected.y[i];
    if (!bitwise) {
      bound = (u == v ? 0 : u * std::fabs(exact)) + (p.dtype == DType::f16 ? 0x1p-25 : 0);
      bound += a.traits.accuracy == Accuracy::exact ? terms * v / (1 - terms * v) * expected.magnitude[i]
                                                    : a.traits.error_bound * (v / 0x1p-24) * largest;
      if (activates(p)) bound += 8 * v * (1 + std::fabs(exact)) + 1.2 * bound;  // slopes are below 1.2
    }
    ASSERT_LE(std::fabs(y[i] - exact), bound) << "element " << i << " is " << y[i] << ", must be " << exact;
  }
}

// What is not known when only the layer is: the batch and the image.
void forget_shape(Conv2dProblem& p) { p.batch = p.in_height = p.in_width = p.out_height = p.out_width = -1; }
void forget_shape(LinearProblem& p) { p.rows = -1; }
void forget_shape(Pool2dProblem& p) { p.batch = p.in_height = p.in_width = p.out_height = p.out_width = -1; }
void forget_shape(ElementwiseProblem& p) { p.count = -1; }
// Another input for the same weights.
void change_shape(Conv2dProblem& p) { p.batch += 2, p.in_height += 5, p.in_width += 3, p.out_height += 5, p.out_width += 3; }
void change_shape(LinearProblem& p) { p.rows += 13; }
template <class P>
void change_shape(P&) {}

template <class P>
class Kernel : public testing::Test {
 public:
  explicit Kernel(const AlgorithmInfo& info) : a_(reinterpret_cast<const Algorithm<P>&>(info)) {}

  void TestBody() override {
    const auto& t = a_.traits;
    ASSERT_EQ(t.packed_bytes != nullptr, t.pack != nullptr);
    EXPECT_TRUE(t.accuracy != Accuracy::bounded || t.error_bound > 0) << "states no bound";
    int done = 0;
    for (P p : problems::all(static_cast<P*>(nullptr), a_.info.operation))
      for (DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16}) {
        p.dtype = dtype;
        Reason reason{};
        if (!supported(a_, p, reason)) {
          EXPECT_TRUE(!(t.dtypes & dtype_bit(dtype)) || *reason.text) << "a refusal without a reason";
          continue;
        }
        P unknown = p;
        forget_shape(unknown);
        EXPECT_TRUE(supported(a_, unknown, reason)) << "refuses where sizes are unknown: " << reason.text;
        for (const Way& way : {Way{Flush::end, Values::integers}, Way{Flush::begin, Values::reals}}) {
          check(p, way, way.flush == Flush::begin ? 3 : 1);
          if (HasFatalFailure()) return;
        }
        done++;
        if (dtype != DType::f32) continue;
        if (t.pack) packs_alike(p);
        if constexpr (requires { p.activation; })
          if (t.epilogue)
            for (Activation activation :
                 {Activation::relu, Activation::relu6, Activation::hardswish, Activation::silu, Activation::gelu}) {
              P fused = p;
              fused.activation = activation, fused.has_residual = activation != Activation::gelu;
              check(fused, {Flush::end, Values::reals}, 1);
              if (HasFatalFailure()) return;
            }
      }
    EXPECT_GT(done, 0) << "supports none of the problems";
  }

 private:
  bool usable_layout(const P& p) const {
    if constexpr (requires { p.x_stride; })
      return a_.traits.layout == Layout::any || (a_.traits.layout == Layout::nhwc) == (p.x_stride.c == 1);
    return true;
  }

  void check(P p, const Way& way, int threads) const {
    if (!usable_layout(p)) return;
    p.threads = threads;
    const std::string where = std::string(a_.info.level) + " " + a_.info.operation + "_" + a_.info.name + " " + name_of(p.dtype) +
                              " " + problems::describe(p) + (way.values == Values::integers ? " integers" : " reals") + " on " +
                              std::to_string(threads) + " threads";
    SCOPED_TRACE(where);
    std::snprintf(current_case, sizeof(current_case), "%s", where.c_str());
    Reference expected;
    const auto y = run(a_, p, way, expected);
    compare(a_, p, way.values, y, expected);
  }

  // Packed weights serve every batch and image size.
  void packs_alike(const P& p) const {
    P other = p;
    change_shape(other);
    const int64_t bytes = a_.traits.packed_bytes(p);
    ASSERT_EQ(bytes, a_.traits.packed_bytes(other)) << problems::describe(p);
    const Data w(p.dtype, extent(p).weight, Flush::end, Values::reals, 2);
    std::vector<char> one(bytes), two(bytes);
    a_.traits.pack(p, w.stored(), one.data());
    a_.traits.pack(other, w.stored(), two.data());
    EXPECT_EQ(one, two) << problems::describe(p);
  }

  const Algorithm<P>& a_;
};

template <class P>
void add(const AlgorithmInfo& info) {
  if (!reinterpret_cast<const Algorithm<P>&>(info).run) return;
  const std::string name = std::string(info.level) + "_" + info.operation + "_" + info.name;
  testing::RegisterTest("Kernels", name.c_str(), nullptr, nullptr, __FILE__, __LINE__,
                        [&info]() -> testing::Test* { return new Kernel<P>(info); });
}

}  // namespace

// One test for each algorithm of each level that this machine runs.
void register_kernel_tests() {
  for (auto a = __start_ai3_algorithms; a != __stop_ai3_algorithms; a++) {
    if (!usable((*a)->level)) continue;
    const std::string operation = (*a)->operation;
    if (operation == "conv2d")
      add<Conv2dProblem>(**a);
    else if (operation == "linear")
      add<LinearProblem>(**a);
    else if (operation == "relu" || operation == "flatten")
      add<ElementwiseProblem>(**a);
    else
      add<Pool2dProblem>(**a);
  }
}

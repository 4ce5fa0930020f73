// Every algorithm of every level against the reference, with guard pages around all that it may touch.
#include <gtest/gtest.h>

#include <cmath>
#include <sstream>
#include <string>
#include <vector>

#include "run.h"

namespace {
using namespace ai3;

constexpr double unit_roundoff(DType t) {
  return t == DType::f64 ? 0x1p-53 : t == DType::f32 ? 0x1p-24 : t == DType::bf16 ? 0x1p-8 : 0x1p-11;
}
constexpr DType accumulator(DType t) { return t == DType::f64 ? DType::f64 : DType::f32; }

double rounded(DType t, double v) {
  char stored[8];
  put(t, stored, 0, v);
  return get(t, stored, 0);
}

template <class P>
bool activates(const P& p) {
  if constexpr (requires { p.activation; }) return p.activation > Activation::relu6;
  return false;
}

bool multiplies_pairs(const Algorithm<AttentionProblem>& a, const AttentionProblem& p) {
  const bool in_tiles = std::string(a.info.name) != "math" && p.queries > 4;
  return in_tiles && std::string(a.info.level) == "avx512" && level_has_pair_products() && p.size % 2 == 0;
}

// The bounds of the accuracy classes, see DESIGN on accuracy: sums of small integers have no rounding but the last.
template <class P>
void compare(const Algorithm<P>& a, const P& p, const Inputs<P>& in, Values values, const std::vector<double>& y,
             const Reference& expected) {
  double steepest = 1.2;  // silu's and gelu's
  for (double slope : in.slope.doubles) steepest = std::fmax(steepest, std::fabs(slope));
  const double u = unit_roundoff(p.dtype), v = unit_roundoff(accumulator(p.dtype)), terms = static_cast<double>(extent(p).terms);
  const bool averages = std::string(a.info.operation).find("avg") != std::string::npos;
  const bool bitwise = a.traits.accuracy == Accuracy::exact && values == Values::integers && !averages && !activates(p);
  for (size_t i = 0; i < y.size(); i++) {
    double bound = 0;
    const double exact = bitwise ? rounded(p.dtype, expected.y[i]) : expected.y[i];
    if (!bitwise) {
      bound = (u == v ? 0 : u * std::fabs(exact)) + (p.dtype == DType::f16 ? 0x1p-25 : 0);
      bound += a.traits.accuracy == Accuracy::exact ? terms * v / (1 - terms * v) * expected.magnitude[i]
                                                    : a.traits.error_bound * (v / 0x1p-24) * expected.largest;
      if constexpr (std::is_same_v<P, AttentionProblem>)  // weights are rounded to be multiplied in pairs (tile_products.h)
        if (p.dtype == DType::bf16 && multiplies_pairs(a, p)) bound += u * expected.magnitude[i];
      if (activates(p)) bound += 8 * v * (1 + std::fabs(exact)) + steepest * bound;
    }
    ASSERT_LE(std::fabs(y[i] - exact), bound) << "element " << i << " is " << y[i] << ", must be " << exact;
  }
}

// What is not known when only the layer is: the batch and the image.
void forget_shape(Conv2dProblem& p) { p.batch = p.in_height = p.in_width = p.out_height = p.out_width = -1; }
// Nor more than that it is a convolution of so many channels.
void forget_window(Conv2dProblem& p) {
  forget_shape(p);
  p.kernel_height = p.kernel_width = p.stride_h = p.stride_w = p.pad_h = p.pad_w = p.dilation_h = p.dilation_w = -1;
}
template <class P>
void forget_window(P&) {}
void forget_shape(LinearProblem& p) { p.rows = -1; }
void forget_shape(Pool2dProblem& p) { p.batch = p.in_height = p.in_width = p.out_height = p.out_width = -1; }
void forget_shape(ElementwiseProblem& p) { p.count = -1; }
void forget_shape(AttentionProblem& p) { p.outer = p.batch = p.queries = p.keys = -1; }
// Another input for the same weights.
void change_shape(Conv2dProblem& p) { p.batch += 2, p.in_height += 5, p.in_width += 3, p.out_height += 5, p.out_width += 3; }
void change_shape(LinearProblem& p) { p.rows += 13; }
template <class P>
void change_shape(P&) {}

template <class P>
class Kernel : public testing::Test {
 public:
  explicit Kernel(const Algorithm<P>& a) : a_(a) {}

  void TestBody() override {
    const auto& t = a_.traits;
    ASSERT_EQ(t.packed_bytes != nullptr, static_cast<bool>(t.pack));
    EXPECT_TRUE(t.accuracy != Accuracy::bounded || t.error_bound > 0) << "states no bound";
    constexpr DType others[] = {DType::f64, DType::bf16, DType::f16};
    int done = 0, problem = 0;
    std::string refusal;
    for (P p : problems::all(static_cast<P*>(nullptr), a_.info.operation)) {
      const DType other = others[problem++ % 3];  // by turns
      for (DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16}) {
        if (!is_compiled(a_.info.level, dtype)) continue;
        if (dtype != DType::f32 && dtype != other && !at_full_size()) continue;
        p.dtype = dtype;
        Reason reason{};
        if (!supported(a_, p, reason)) {
          EXPECT_TRUE(!(t.dtypes & dtype_bit(dtype)) || *reason.text) << "a refusal without a reason";
          if (t.dtypes & dtype_bit(dtype)) refusal = reason.text;
          continue;
        }
        P unknown = p;
        forget_shape(unknown);
        EXPECT_TRUE(supported(a_, unknown, reason)) << "refuses where sizes are unknown: " << reason.text;
        forget_window(unknown);
        EXPECT_TRUE(supported(a_, unknown, reason)) << "refuses where the window is unknown: " << reason.text;
        if (t.cost) t.cost(unknown);  // which rules may ask for
        for (const Way& way : {Way{Flush::end, Values::integers}, Way{Flush::begin, Values::reals}}) {
          check(p, way, way.flush == Flush::begin ? 3 : 1);
          if (HasFatalFailure()) return;
        }
        done++;
        if (t.pack) packs_alike(p);
        if constexpr (requires { p.wide_weight; })
          if (size_of(dtype) == 2) {
            P wide = p;
            wide.wide_weight = true;
            check(wide, {Flush::end, Values::reals}, 2);
            if (HasFatalFailure()) return;
          }
        // What is fused: in float32 a quarter of it at every problem, in the other types one of each, by turns.
        const bool all = dtype == DType::f32;
        const int turn = next_++, quarter = floats_ / 2 % 4;
        if (all) floats_++;
        if constexpr (requires { p.has_prologue; })
          if (t.prologue)
            for (bool relu : {false, true}) {
              if (!all && relu != (turn % 2 == 0)) continue;
              P fused = p;
              fused.has_prologue = true, fused.input_relu = relu;
              check(fused, {relu ? Flush::end : Flush::begin, Values::integers}, 2);
              if (HasFatalFailure()) return;
            }
        if constexpr (requires { p.activation; })
          if (t.epilogue)
            for (int i = 1; i <= static_cast<int>(Activation::elu); i++) {
              if (all ? i % 4 != quarter && !at_full_size() : i != 1 + turn % static_cast<int>(Activation::elu)) continue;
              if (all) met_ |= 1u << i;
              P fused = p;
              fused.activation = static_cast<Activation>(i);
              fused.has_residual = fused.activation != Activation::gelu && fused.activation != Activation::prelu;
              if (!(t.activations & activation_bit(fused.activation))) continue;
              check(fused, {Flush::end, Values::reals}, 1);
              if (fused.has_residual) check(fused, {Flush::begin, Values::integers}, 2, true);
              if (HasFatalFailure()) return;
            }
      }
    }
    // block_sparse needs lists of blocks, bigbird the size of one: tests of the operators give them.
    if (!done && names_own(refusal)) GTEST_SKIP() << "problems have no parameters of its own: " << refusal;
    EXPECT_GT(done, 0) << "supports none of the problems";
    if constexpr (requires(P p) { p.activation; }) {
      EXPECT_TRUE(!t.epilogue || floats_ < 8 || met_ == (2u << static_cast<int>(Activation::elu)) - 2)
          << "activations were left out";
    }
  }

 private:
  // Whether a refusal is of a parameter of the algorithm's own, which it names.
  bool names_own(const std::string& refusal) const {
    const std::string own = a_.traits.parameters ? a_.traits.parameters : "";
    std::istringstream words(refusal);
    for (std::string word; words >> word;)
      if (own.find(" " + word + "=") != own.npos || own.find(" " + word + ",") != own.npos) return true;
    return false;
  }
  void check(P p, const Way& way, int threads, bool onto_residual = false) const {
    if (!usable_layout(a_, p)) return;
    p.threads = threads;
    const std::string where = describe(a_, p) + (way.values == Values::integers ? ", integers" : ", reals");
    SCOPED_TRACE(where);
    std::snprintf(current_case, sizeof(current_case), "%s", where.c_str());
    const Inputs<P> in(p, way);
    const Guarded stored = run(a_, p, in, way.flush, extent(p).output, onto_residual);
    std::vector<double> y(extent(p).output);
    for (size_t i = 0; i < y.size(); i++) y[i] = get(p.dtype, stored.as<char>(), i);
    compare(a_, p, in, way.values, y,
            reference(a_.info.operation, p, in.convolved(p).data(), in.weight.values(), in.bias.values(), in.residual.values(),
                      in.slope.values()));
  }

  // Packed weights serve every batch and image size.
  void packs_alike(const P& p) const {
    P other = p;
    change_shape(other);
    const int64_t bytes = a_.traits.packed_bytes(p);
    ASSERT_EQ(bytes, a_.traits.packed_bytes(other)) << problems::describe(p);
    if (bytes == 0) return;  // the weight as it is
    const Data w(p.dtype, extent(p).weight, Flush::end, Values::reals, 2);
    std::vector<char> one(bytes), two(bytes);
    pack(a_, p, w.stored(), one.data(), Flush::begin);
    pack(a_, other, w.stored(), two.data(), Flush::begin);
    EXPECT_EQ(one, two) << problems::describe(p);
  }

  const Algorithm<P>& a_;
  int next_ = 0, floats_ = 0;  // problems so far: of all types, of float32
  unsigned met_ = 0;           // activations of float32, a bit each
};

}  // namespace

// One test for each algorithm of each level that this machine runs.
void register_kernel_tests() {
  each_kernel([]<class P>(const Algorithm<P>& a) {
    if (std::string(a.info.level) == "counting" && !at_full_size()) return;  // the portable kernels, at -O1
    testing::RegisterTest("Kernels", test_name(a).c_str(), nullptr, nullptr, __FILE__, __LINE__,
                          [&a]() -> testing::Test* { return new Kernel<P>(a); });
  });
}

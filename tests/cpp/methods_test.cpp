// A name is a promise: the multiplications that each method is known for, counted by kernels built at the level `counting`.
//
// The product phase is what grows with the product of input and output channels, so its multiplications are the mixed difference
// f(2C, 2K) - f(2C, K) - f(C, 2K) + f(C, K) = a C K of the counts f; transforms and the epilogue grow with one of them and
// vanish.
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <type_traits>
#include <vector>

#include "run.h"

namespace {
using namespace ai3;

template <class P>
int64_t count(const Algorithm<P>& a, const P& p) {
  const auto& t = a.traits;
  const Extent elements = extent(p);
  std::vector<float> x(elements.input, 1), w(elements.weight, 1), y(elements.output);
  const int64_t bytes = t.workspace ? t.workspace(p) : 0;
  const Guarded scratch(bytes, Flush::end), packed(t.packed_bytes ? round_up(t.packed_bytes(p), 64) : 0, Flush::end);
  Workspace none{nullptr, 0, 0, nullptr};
  if (t.pack) t.pack(p, w.data(), packed.as<char>(), none);
  Workspace workspace{scratch.as<char>(), bytes, 0, nullptr};
  take_multiplications();
  a.run(p, {x.data(), t.pack ? packed.as<char>() : static_cast<const void*>(w.data()), nullptr, nullptr, y.data()}, workspace);
  return take_multiplications();
}

constexpr int64_t kChannels = 16;

// Multiplications of the product phase for each pair of input and output channels; f(in, out) are all of them.
template <class F>
double per_channel_pair(const F& f) {
  const int64_t n = kChannels;
  return static_cast<double>(f(2 * n, 2 * n) - f(2 * n, n) - f(n, 2 * n) + f(n, n)) / static_cast<double>(n * n);
}

// Sizes that tiles of 2, 3, 4, 6, 7, 12, 14, 21, 28 or 42 divide, so that no method computes a remainder in vain.
constexpr int64_t kHeight = 12, kWidth = 84, kPixels = kHeight * kWidth;
constexpr problems::Conv kNoPadding = {1, 0, kHeight + 2, kWidth + 2, 0, 3, 3, 1, 1, 0, 0, 1, 1, 1};
constexpr problems::Conv kPadded = {1, 0, kHeight, kWidth, 0, 3, 3, 1, 1, 1, 1, 1, 1, 1};
// As kNoPadding, for another kernel.
constexpr problems::Conv kernel_of(int64_t r, int64_t s) {
  return {1, 0, kHeight + r - 1, kWidth + s - 1, 0, r, s, 1, 1, 0, 0, 1, 1, 1};
}
constexpr problems::Conv kFollowing = {1, 0, 3 * kHeight, 3 * kWidth, 0, 3, 3, 3, 3, 0, 0, 1, 1, 1};
constexpr problems::Conv kLargeKernel = {1, 0, 24, 24, 0, 11, 11, 1, 1, 5, 5, 1, 1, 1};

struct Promise {
  const char* why;
  problems::Conv problem;
  double least, most;  // multiplications in the product phase for each pair of channels
};
void PrintTo(const Promise& p, std::ostream* out) { *out << p.why; }
constexpr double kDirect = kPixels * 9, kLargeDirect = 24 * 24 * 121;
constexpr double kLargeSpectra = 4. * 32 * 16 * 3;   // four tiles of 32x32, half of whose spectrum says all, complex products
constexpr double kLineSpectra = kHeight * 129. * 3;  // a tile of 256 for each row, complex products of 129 frequencies
constexpr double kInside = (3 * kHeight - 2) * (3 * kWidth - 2);  // of kPadded's products, those whose input exists
const std::multimap<std::string, Promise> promises = {
    {"direct", {"each product once", kNoPadding, kDirect, kDirect}},
    {"direct", {"no more than the padded window", kPadded, kInside, kDirect}},
    {"smm", {"each product once", kNoPadding, kDirect, kDirect}},
    {"smm", {"shifted rows: padding is not multiplied", kPadded, kInside, 1.02 * kInside}},
    {"im2col", {"a matrix of N*OH*OW x C*R*S", kNoPadding, kDirect, kDirect}},
    {"im2col", {"the matrix holds the padding's zeros", kPadded, kDirect, kDirect}},
    {"implicit_gemm", {"a matrix of N*OH*OW x C*R*S", kNoPadding, kDirect, kDirect}},
    {"implicit_gemm", {"the matrix holds the padding's zeros", kPadded, kDirect, kDirect}},
    {"implicit_precomp_gemm", {"a matrix of N*OH*OW x C*R*S", kNoPadding, kDirect, kDirect}},
    {"implicit_precomp_gemm", {"pointers to a row of zeros stand for the padding", kPadded, kDirect, kDirect}},
    {"kn2row", {"R*S products of the input with a 1x1 kernel", kNoPadding, kDirect, kDirect}},
    {"kn2row", {"sums are shifted, so padding is not multiplied", kPadded, kInside, kInside}},
    {"patch_gemm", {"each product once", kFollowing, kDirect, kDirect}},
    {"winograd_f2", {"16 for 36: 2.25 times fewer", kNoPadding, kDirect * 16 / 36, 1.02 * kDirect * 16 / 36}},
    {"winograd_f4", {"36 for 144: 4 times fewer", kNoPadding, kDirect * 36 / 144, 1.02 * kDirect * 36 / 144}},
    {"winograd_f6", {"64 for 324: 5.06 times fewer", kNoPadding, kDirect * 64 / 324, 1.02 * kDirect * 64 / 324}},
    {"winograd_f4_bf16", {"36 for 144: 4 times fewer", kNoPadding, kDirect * 36 / 144, 1.02 * kDirect * 36 / 144}},
    {"winograd_general", {"F(2x4, 3x3), 24 for 72", kNoPadding, kDirect * 24 / 72, 1.02 * kDirect * 24 / 72}},
    {"winograd_general", {"F(2x2, 5x5), 36 for 100", kernel_of(5, 5), kPixels * 9, 1.02 * kPixels * 9}},
    {"winograd_general", {"F(4, 3), 6 for 12", kernel_of(1, 3), kPixels * 1.5, 1.02 * kPixels * 1.5}},
    {"winograd_general", {"F(4, 3), 6 for 12", kernel_of(3, 1), kPixels * 1.5, 1.02 * kPixels * 1.5}},
    {"winograd_general", {"F(4, 7), 10 for 28", kernel_of(1, 7), kPixels * 2.5, 1.02 * kPixels * 2.5}},
    {"winograd_general", {"F(4, 7), 10 for 28", kernel_of(7, 1), kPixels * 2.5, 1.02 * kPixels * 2.5}},
    {"winograd_f2", {"padding costs nothing more", kPadded, kDirect * 16 / 36, 1.02 * kDirect * 16 / 36}},
    {"fft", {"below direct for large kernels", kLargeKernel, kLargeSpectra, kLargeDirect / 4}},
    {"fft", {"in one dimension for kernels of one row", kernel_of(1, 128), kLineSpectra, kLineSpectra}},
};

// The counting kernels of an operation that can do p; conv1d's have conv2d's problem, too.
template <class P>
std::vector<std::string> methods(const std::string& operation, const P& p) {
  std::vector<std::string> names;
  each_kernel([&]<class Q>(const Algorithm<Q>& a) {
    if constexpr (std::is_same_v<P, Q>) {
      Reason reason;
      if (a.info.level == std::string("counting") && a.info.operation == operation &&
          (!a.traits.supports || a.traits.supports(p, reason)))
        names.push_back(a.info.name);
    }
  });
  return names;
}

// A method of which nothing is said multiplies each product once.
std::multimap<std::string, Promise> all_promises() {
  std::multimap<std::string, Promise> all = promises;
  problems::Conv c = kNoPadding;
  c.c = c.k = kChannels;
  for (const std::string& name : methods("conv2d", problems::conv2d(c, true, false)))
    if (!promises.count(name)) all.insert({name, {"each product once", kNoPadding, kDirect, kDirect}});
  return all;
}

class Counting : public testing::TestWithParam<std::pair<const std::string, Promise>> {};

TEST_P(Counting, MultiplicationsAreThoseOfTheMethod) {
  const auto& [name, promise] = GetParam();
  const AlgorithmInfo* info = algorithm("counting", "conv2d", name);
  ASSERT_NE(info, nullptr) << "no conv2d algorithm " << name;
  const auto& a = reinterpret_cast<const Algorithm<Conv2dProblem>&>(*info);
  const double found = per_channel_pair([&](int64_t in, int64_t out) {
    problems::Conv c = promise.problem;
    c.c = in, c.k = out;
    return count(a, problems::conv2d(c, a.traits.layout != Layout::nchw, false));
  });
  EXPECT_GE(found, promise.least) << promise.why;
  EXPECT_LE(found, promise.most) << promise.why;
}
INSTANTIATE_TEST_SUITE_P(, Counting, testing::ValuesIn(all_promises()),
                         [](const auto& info) { return std::to_string(info.index) + "_" + info.param.first; });

LinearProblem linear_problem(int64_t in, int64_t out) {
  LinearProblem p{};
  p.dtype = DType::f32, p.threads = 1, p.rows = kWidth, p.in_features = in, p.out_features = out;
  return with_dense_rows(p);
}
int64_t count_linear(const std::string& name, int64_t in, int64_t out) {
  return count(reinterpret_cast<const Algorithm<LinearProblem>&>(*algorithm("counting", "linear", name)),
               linear_problem(in, out));
}

class CountingLinear : public testing::TestWithParam<std::string> {};

TEST_P(CountingLinear, EachProductOnce) {
  EXPECT_EQ(per_channel_pair([](int64_t in, int64_t out) { return count_linear(GetParam(), in, out); }), kWidth);
}
INSTANTIATE_TEST_SUITE_P(, CountingLinear, testing::ValuesIn(methods("linear", linear_problem(kChannels, kChannels))),
                         [](const auto& info) { return info.param; });

TEST(CountingGemm, FewOutputsMultiplyNoPanelOfZeros) { EXPECT_EQ(count_linear("gemm", 32, 3), 32 * 3 * kWidth); }

TEST(CountingDepthwise, EachProductOnce) {
  const AlgorithmInfo* info = algorithm("counting", "conv2d", "depthwise");
  ASSERT_NE(info, nullptr);
  const auto& a = reinterpret_cast<const Algorithm<Conv2dProblem>&>(*info);
  problems::Conv c = kNoPadding;
  c.c = c.k = c.groups = 32;
  const int64_t found = count(a, problems::conv2d(c, a.traits.layout != Layout::nchw, false));
  EXPECT_GE(found, 32 * kPixels * 9);
  EXPECT_LE(found, 32 * kPixels * 9 * 11 / 10) << "direct convolution multiplies by each of the kernel's weights once";
}

}  // namespace

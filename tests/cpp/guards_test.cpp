// Every algorithm of every level on many awkward problems, each run twice: with guard pages right behind every buffer, and right
// before. Reading or writing one element too many is a fault; what comes out must be bitwise the same both times, on one thread
// and on three, and never what lay in the memory before (NaN). Values are the matter of kernels_test.cpp. Kernels for gradients
// likewise.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "run.h"

namespace {
using namespace ai3;

// Kernel, stride, padding, dilation: what the networks have and what they do not.
struct Window {
  int64_t r, s, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
};
constexpr Window windows[] = {
    {3, 3, 1, 1, 1, 1, 1, 1}, {1, 1, 1, 1, 0, 0, 1, 1}, {3, 3, 2, 2, 1, 1, 1, 1}, {3, 3, 1, 1, 0, 0, 1, 1},
    {5, 5, 1, 1, 2, 2, 1, 1}, {1, 7, 1, 1, 0, 3, 1, 1}, {7, 1, 1, 1, 3, 0, 1, 1}, {1, 3, 1, 1, 0, 1, 1, 1},
    {3, 1, 1, 1, 1, 0, 1, 1}, {3, 3, 1, 1, 2, 2, 2, 2}, {1, 1, 2, 2, 0, 0, 1, 1}, {5, 5, 2, 2, 2, 2, 1, 1},
    {7, 7, 2, 2, 3, 3, 1, 1}, {4, 2, 1, 3, 0, 1, 1, 1}, {7, 7, 1, 1, 3, 3, 1, 1}, {11, 11, 4, 4, 2, 2, 1, 1},
    {3, 3, 1, 1, 4, 4, 1, 1}, {7, 7, 2, 2, 8, 8, 1, 1}, {2, 3, 2, 3, 0, 0, 1, 1}, {1, 37, 1, 1, 0, 18, 1, 1},
    {1, 7, 1, 1, 0, 3, 2, 1},
};

// The smallest image with `out` output rows or columns, and the `more` of it that the stride leaves unread.
int64_t image(int64_t out, int64_t kernel, int64_t stride, int64_t pad, int64_t dilation, int64_t more) {
  const int64_t least = (out - 1) * stride + dilation * (kernel - 1) + 1 - 2 * pad + more % stride;
  return least > 0 ? least : 1;
}

// For every window every number of channels up to 17 and some around multiples of the widest vector, going in, coming out or
// depthwise in turn; outputs of up to 7x19 pixels, and both layouts.
std::vector<Conv2dProblem> sweep(Conv2dProblem*) {
  std::vector<Conv2dProblem> result;
  std::mt19937 random(1);
  auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<unsigned>(n)); };
  const int64_t wide[] = {31, 32, 33, 47, 48, 49, 63, 64, 65, 96, 129};
  auto add = [&](const Window& v, int64_t c, int64_t k, int64_t groups) {
    const int64_t h = image(1 + below(7), v.r, v.stride_h, v.pad_h, v.dilation_h, below(3)),
                  w = image(1 + below(19), v.s, v.stride_w, v.pad_w, v.dilation_w, below(3));
    for (bool nhwc : {false, true})
      result.push_back(problems::conv2d(
          {1 + below(2), c, h, w, k, v.r, v.s, v.stride_h, v.stride_w, v.pad_h, v.pad_w, v.dilation_h, v.dilation_w, groups},
          nhwc, below(2)));
  };
  for (size_t i = 0; i < std::size(windows); i++) {
    const Window& v = windows[i];
    for (int64_t c = 1; c <= 17; c++) switch ((c + static_cast<int64_t>(i)) % 3) {
        case 0: add(v, c, 1 + below(35), 1); break;
        case 1: add(v, 1 + below(35), c, 1); break;
        default: add(v, c, c, c);
      }
    const int64_t groups = 2 + below(4), channels = wide[below(std::size(wide))];
    add(v, wide[below(std::size(wide))], wide[below(std::size(wide))], 1);
    add(v, groups * (1 + below(9)), groups * (1 + below(9)), groups);
    add(v, channels, channels * (1 + below(2)), channels);
    add(v, 32, 32, 32 >> (1 + i % 4));  // groups that fill vectors
    add(v, 40, 40, 5);                  // and share the last one, with AVX-512
    add(v, 20, 20, 5);                  // with AVX2, too
  }
  return result;
}

std::vector<LinearProblem> sweep(LinearProblem*) {
  std::vector<LinearProblem> result;
  std::mt19937 random(1);
  const int64_t sizes[] = {1, 2, 3, 5, 7, 8, 9, 13, 15, 16, 17, 29, 31, 32, 33, 47, 49, 63, 64, 65, 127, 130, 257};
  for (int64_t rows : sizes)
    for (int64_t in : sizes)
      for (int i = 0; i < 2; i++) {
        LinearProblem p{};
        p.rows = rows, p.in_features = in, p.out_features = sizes[random() % std::size(sizes)], p.has_bias = random() % 2;
        result.push_back(with_dense_rows(p));
      }
  return result;
}

std::vector<Pool2dProblem> sweep(Pool2dProblem*) {
  std::vector<Pool2dProblem> result;
  std::mt19937 random(1);
  auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<unsigned>(n)); };
  for (int64_t channels : {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 65})
    for (int i = 0; i < 12; i++) {
      Pool2dProblem p{};
      p.batch = 1 + below(2), p.channels = channels, p.dilation_h = p.dilation_w = 1;
      p.kernel_height = 1 + below(3), p.kernel_width = 1 + below(3), p.stride_h = 1 + below(3), p.stride_w = 1 + below(3);
      p.pad_h = below(p.kernel_height / 2 + 1), p.pad_w = below(p.kernel_width / 2 + 1), p.count_include_pad = below(2);
      p.out_height = 1 + below(7), p.out_width = 1 + below(19);
      p.in_height = image(p.out_height, p.kernel_height, p.stride_h, p.pad_h, 1, below(3));
      p.in_width = image(p.out_width, p.kernel_width, p.stride_w, p.pad_w, 1, below(3));
      p.out_height = (p.in_height + 2 * p.pad_h - p.kernel_height) / p.stride_h + 1;
      p.out_width = (p.in_width + 2 * p.pad_w - p.kernel_width) / p.stride_w + 1;
      for (bool nhwc : {false, true}) {
        p.x_stride = problems::strides(nhwc, channels, p.in_height, p.in_width);
        p.y_stride = problems::strides(nhwc, channels, p.out_height, p.out_width);
        result.push_back(p);
      }
    }
  return result;
}

std::vector<ElementwiseProblem> sweep(ElementwiseProblem*) {
  std::vector<ElementwiseProblem> result;
  for (int64_t count = 1; count <= 130; count++) result.push_back(contiguous_elements(DType::f32, 1, count));
  return result;
}

std::vector<AttentionProblem> sweep(AttentionProblem*) {
  std::vector<AttentionProblem> result;
  for (int64_t size = 1; size <= 70; size++)
    result.push_back(
        problems::attention({1, 2, 1, 1 + size * 5 % 37, 1 + size * 7 % 150, size, 1 + size * 3 % 67, size % 2 == 0}));
  return result;
}

// Problems of more than one block of the caches.
std::vector<Conv2dProblem> large(Conv2dProblem*) {
  std::vector<Conv2dProblem> result;
  for (const problems::Conv& c : {problems::conv3x3(1, 67, 45, 51, 131, 1), problems::conv3x3(1, 257, 15, 13, 67, 1),
                                  problems::conv3x3(1, 130, 29, 31, 130, 1, 130)})
    for (bool nhwc : {false, true}) result.push_back(problems::conv2d(c, nhwc, true));
  for (const Window& v : {windows[1], windows[2], windows[4]})
    for (bool nhwc : {false, true})
      result.push_back(
          problems::conv2d({2, 515, 15, 14, 133, v.r, v.s, v.stride_h, v.stride_w, v.pad_h, v.pad_w, 1, 1, 1}, nhwc, true));
  return result;
}
std::vector<LinearProblem> large(LinearProblem*) {
  std::vector<LinearProblem> result;
  for (int64_t rows : {1, 67, 211}) {
    LinearProblem p{};
    p.rows = rows, p.in_features = 1031, p.out_features = 519, p.has_bias = true;
    result.push_back(with_dense_rows(p));
  }
  return result;
}
template <class P>
std::vector<P> large(P*) {
  return {};
}

template <class P>
class Guards : public testing::Test {
 public:
  explicit Guards(const Algorithm<P>& a) : a_(a) {}

  void TestBody() override {
    constexpr DType others[] = {DType::f64, DType::bf16, DType::f16};
    // A thread of a GPU has neither vectors nor blocks of the caches, and a norm's barriers take long on the host: some of the
    // problems, by turns of both layouts and all types, will do. So they do for levels below the machine's best, unless all is
    // to be run.
    const std::string level = a_.info.level;
    const bool cuda = level == "cuda", best = level == usable_levels().front();
    constexpr bool is_norm = requires(P p) { p.wide_weight; };
    const size_t each = at_full_size() ? 1 : cuda ? (is_norm ? 13 : 9) : best ? 3 : 7;
    size_t next = 0;
    for (const P& p : sweep(static_cast<P*>(nullptr)))
      if (const size_t now = next++; now % each == 0) {
        if (!check(p, DType::f32)) return;
        const size_t turn = now / each;
        if (cuda || at_full_size() || turn % 3 == 0)
          if (!check(p, others[(turn % 3 == 0 ? turn / 3 : turn) % 3])) return;
      }
    if (cuda) return;
    for (const P& p : large(static_cast<P*>(nullptr)))
      for (DType dtype : {DType::f32, DType::bf16})
        if (!check(p, dtype)) return;
  }

 private:
  // False after a failure.
  bool check(P p, DType dtype) {
    if (!is_compiled(a_.info.level, dtype)) return true;
    Reason reason;
    p.dtype = dtype;
    if constexpr (requires(typename P::Gradients m) { m.grad_weight; })
      for (bool of_weight : {false, true})
        if (supported(a_, p, reason) && has_backward(a_, p, of_weight) && (!of_weight || extent(p).weight > 0))
          compare_gradients(p, of_weight);
    if (!usable_layout(a_, p) || !supported(a_, p, reason)) return !HasFailure();
    compare(p);
    if constexpr (requires { p.y_stride, p.out_channels; })
      if (a_.traits.sliced && dtype == DType::f32) slice(p);
    if constexpr (requires { p.activation; })
      if (a_.traits.epilogue && dtype == DType::f32) {
        p.activation = Activation::hardswish, p.has_residual = true;
        compare(p);
      }
    return !HasFailure();
  }

  std::vector<char> output(P& p, const Inputs<P>& in, Flush flush, int threads, int64_t span) {
    p.threads = threads;
    std::snprintf(current_case, sizeof(current_case), "%s", describe(a_, p).c_str());
    const Guarded y = run(a_, p, in, flush, span);
    return {y.as<char>(), y.as<char>() + span * size_of(p.dtype)};
  }
  std::vector<char> output(P& p, Flush flush, int threads, int64_t span) {
    return output(p, Inputs<P>(p, {flush, Values::integers}), flush, threads, span);
  }

  void compare(P p) {
    const int64_t count = extent(p).output;
    const auto end = output(p, Flush::end, 1, count), begin = output(p, Flush::begin, 3, count);
    for (int64_t i = 0; i < count; i++)
      ASSERT_FALSE(std::isnan(get(p.dtype, end.data(), i))) << "element " << i << " is NaN in " << describe(a_, p);
    EXPECT_TRUE(end == begin || !a_.traits.deterministic) << "depends on addresses or threads: " << describe(a_, p);
  }

  void compare_gradients(P p, bool of_weight) {
    auto gradient = [&](Flush flush, int threads) {
      p.threads = threads;
      std::snprintf(current_case, sizeof(current_case), "gradient of %s", describe(a_, p).c_str());
      const Data grad(p.dtype, extent(p).output, flush, Values::integers, 5);
      return run_backward(a_, p, Inputs<P>(p, {flush, Values::integers}), grad, of_weight, flush);
    };
    const auto end = gradient(Flush::end, 1), begin = gradient(Flush::begin, 3);
    for (size_t i = 0; i < end.size() / size_of(p.dtype); i++)
      ASSERT_FALSE(std::isnan(get(p.dtype, end.data(), static_cast<int64_t>(i))))
          << "element " << i << " is NaN in the gradient of " << describe(a_, p);
    EXPECT_TRUE(end == begin || !a_.traits.deterministic) << "depends on addresses or threads: gradient of " << describe(a_, p);
  }

  // Into channels of a larger tensor, or `of_input` from such, whose others are NaN: the same values, and nothing between them.
  void slice(P dense) {
    const auto expected = output(dense, Flush::end, 1, extent(dense).output);
    const int64_t size = size_of(dense.dtype);
    auto at = [&](const Strides4& s, int64_t n, int64_t c, int64_t h, int64_t w) {
      return (n * s.n + c * s.c + h * s.h + w * s.w) * size;
    };
    auto for_each = [&](int64_t channels, int64_t height, int64_t width, const auto& body) {
      for (int64_t n = 0; n < dense.batch; n++)
        for (int64_t c = 0; c < channels; c++)
          for (int64_t h = 0; h < height; h++)
            for (int64_t w = 0; w < width; w++) body(n, c, h, w);
    };
    for (bool of_input : {false, true})
      for (Flush flush : {Flush::end, Flush::begin}) {
        P p = dense;
        Inputs<P> in(p, {flush, Values::integers});
        if (of_input) {
          p.x_stride = problems::strides(dense.x_stride.c == 1, p.in_channels + 3, p.in_height, p.in_width);
          const int64_t last = at(p.x_stride, p.batch - 1, p.in_channels - 1, p.in_height - 1, p.in_width - 1);
          auto x = std::make_unique<Guarded>(last + size, flush);
          for_each(p.in_channels, p.in_height, p.in_width, [&](auto... i) {
            std::memcpy(x->as<char>() + at(p.x_stride, i...), in.x.memory->template as<char>() + at(dense.x_stride, i...), size);
          });
          x->protect();
          in.x.memory = std::move(x);
        } else {
          p.y_stride = problems::strides(dense.y_stride.c == 1, p.out_channels + 3, p.out_height, p.out_width);
        }
        const int64_t last = at(p.y_stride, p.batch - 1, p.out_channels - 1, p.out_height - 1, p.out_width - 1);
        auto got = output(p, in, flush, 2, last / size + 1);
        bool same = true;
        for_each(p.out_channels, p.out_height, p.out_width, [&](auto... i) {
          char* element = got.data() + at(p.y_stride, i...);
          same &= std::memcmp(element, expected.data() + at(dense.y_stride, i...), size) == 0;
          std::memset(element, 0xff, size);
        });
        ASSERT_TRUE(same) << (of_input ? "from" : "into") << " a slice of channels it differs: " << describe(a_, p);
        ASSERT_EQ(got, std::vector<char>(got.size(), static_cast<char>(0xff))) << "writes beside its slice: " << describe(a_, p);
      }
  }

  const Algorithm<P>& a_;
};

}  // namespace

// One test for each algorithm of each level that this machine runs.
void register_guard_tests() {
  each_kernel([]<class P>(const Algorithm<P>& a) {
    if (std::string(a.info.level) == "counting") return;  // for numbers of operations; the others are those that users run
    testing::RegisterTest("Guards", test_name(a).c_str(), nullptr, nullptr, __FILE__, __LINE__,
                          [&a]() -> testing::Test* { return new Guards<P>(a); });
  });
}

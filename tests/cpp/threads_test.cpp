// Kernels are called from many threads at once, each with a team of its own: the results are those of one call, and
// ThreadSanitizer sees no race, neither between the calls nor within a team. So are those of more threads than there are cores.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "run.h"

namespace {
using namespace ai3;

// Layers that many threads split otherwise than two do.
std::vector<Conv2dProblem> layers(Conv2dProblem*, const std::string&) {
  std::vector<Conv2dProblem> found;
  for (const problems::Conv& c : {problems::Conv{1, 128, 27, 27, 32, 1, 1, 1, 1, 0, 0, 1, 1, 1},
                                  {1, 64, 13, 13, 256, 1, 1, 1, 1, 0, 0, 1, 1, 1},
                                  {1, 96, 17, 17, 160, 3, 3, 2, 2, 0, 0, 1, 1, 1}})
    for (const bool nhwc : {true, false})
      for (const DType dtype : {DType::f32, DType::bf16}) {
        found.push_back(problems::conv2d(c, nhwc, true));
        found.back().dtype = dtype;
      }
  return found;
}
std::vector<LinearProblem> layers(LinearProblem*, const std::string&) {
  std::vector<LinearProblem> found;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    LinearProblem p{};
    p.dtype = dtype, p.rows = 49, p.in_features = 96, p.out_features = 352, p.has_bias = true;
    found.push_back(with_dense_rows(p));
  }
  return found;
}
std::vector<Pool2dProblem> layers(Pool2dProblem* of, const std::string& operation) { return problems::all(of, operation); }
template <class P>
std::vector<P> layers(P*, const std::string&) {
  return {};
}

template <class P>
class Threads : public testing::Test {
 public:
  explicit Threads(const Algorithm<P>& a) : a_(a) {}

  void TestBody() override {
    // CUDA's kernels are loops on one thread here: only what a call keeps could be seen by another.
    const bool few = std::string(a_.info.level) == "cuda" && !at_full_size();
    for (int64_t i = 0; P p : problems::all(static_cast<P*>(nullptr), a_.info.operation)) {
      if (i++ % 8 && few) continue;
      Reason reason;
      p.threads = 2;
      if (!supported(a_, p, reason)) continue;
      const Inputs<P> in(p, {Flush::end, Values::reals});
      if (usable_layout(a_, p))
        at_once(p, [&] {
          const int64_t count = extent(p).output;
          const Guarded y = run(a_, p, in, Flush::end, count);
          return std::vector<char>(y.as<char>(), y.as<char>() + count * size_of(p.dtype));
        });
      if constexpr (requires { p.has_bias; }) {
        const Data grad(p.dtype, extent(p).output, Flush::end, Values::reals, 5);
        for (bool of_weight : {false, true})
          if (has_backward(a_, p, of_weight)) at_once(p, [&] { return run_backward(a_, p, in, grad, of_weight, Flush::end); });
      }
    }
    for (P p : layers(static_cast<P*>(nullptr), a_.info.operation)) {
      Reason reason;
      if (!is_compiled(a_.info.level, p.dtype) || !supported(a_, p, reason) || !usable_layout(a_, p)) continue;
      const Inputs<P> in(p, {Flush::end, Values::reals});
      const int64_t count = extent(p).output;
      p.threads = 1;
      const Guarded alone = run(a_, p, in, Flush::end, count);
      for (const int threads : {4, 16, 70}) {  // more than most machines have cores, and more than there are shares
        p.threads = threads;
        const Guarded many = run(a_, p, in, Flush::end, count);
        const bool equal = std::memcmp(alone.as<char>(), many.as<char>(), static_cast<size_t>(count * size_of(p.dtype))) == 0;
        EXPECT_TRUE(equal || !a_.traits.deterministic) << describe(a_, p);
      }
    }
  }

 private:
  template <class Output>
  void at_once(const P& p, const Output& output) {
    const std::vector<char> alone = output();
    std::vector<char> together[4];
    {
      std::vector<std::jthread> callers;
      for (auto& y : together) callers.emplace_back([&] { y = output(); });
    }
    for (const auto& y : together) ASSERT_TRUE(y == alone || !a_.traits.deterministic) << describe(a_, p);
  }

  const Algorithm<P>& a_;
};

}  // namespace

// One test for each algorithm of each level that this machine runs.
void register_thread_tests() {
  each_kernel([]<class P>(const Algorithm<P>& a) {
    if (std::string(a.info.level) == "counting") return;  // counts without locks
    testing::RegisterTest("Threads", test_name(a).c_str(), nullptr, nullptr, __FILE__, __LINE__,
                          [&a]() -> testing::Test* { return new Threads<P>(a); });
  });
}

// Kernels are called from many threads at once, each with a team of its own: the results are those of one call, and
// ThreadSanitizer sees no race, neither between the calls nor within a team.
#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

#include "run.h"

namespace {
using namespace ai3;

template <class P>
class Threads : public testing::Test {
 public:
  explicit Threads(const Algorithm<P>& a) : a_(a) {}

  void TestBody() override {
    for (P p : problems::all(static_cast<P*>(nullptr), a_.info.operation)) {
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

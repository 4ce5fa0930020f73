// Every layer of nine networks is split evenly among many threads. Machines with as many cores are not needed: see splits.h.
#include "splits.h"

#include <gtest/gtest.h>

#include <fstream>
#include <set>
#include <string>

#include "support.h"

namespace {
using namespace ai3;
using namespace ai3::splits_test;

constexpr int kThreads[] = {4, 8, 16, 32, 64};
constexpr int64_t kImages[] = {1, 10};
constexpr double kMost = 1.15;  // of a thread's work over the mean

TEST(Splits, AsFewThreadsAsAreDoneAtTheSameTime) {
  for (int threads = 1; threads < 70; threads++)
    for (int64_t count = 1; count < 300; count++) {
      const int team = team_of(threads, count);
      EXPECT_LE(team, threads);
      EXPECT_EQ(ceil_div(count, team), ceil_div(count, threads));
      if (team > 1) {
        EXPECT_GT(ceil_div(count, team - 1), ceil_div(count, threads));
      }
      if (threads == 2 && count >= 2) {
        EXPECT_EQ(team, 2);
      }
    }
}

TEST(Splits, ThreadsTakeOverWhatOthersHaveNotBegun) {
  EXPECT_EQ(longest({4, {1, 1, 1, 1, 1, 1, 1, 1}}, 4), 2);
  EXPECT_EQ(longest({2, {3, 1, 1, 1}}, 2), 3);  // the second thread takes over an item of the first
  EXPECT_EQ(longest({2, {4, 2, 1, 1}}, 2), 4);
  EXPECT_EQ(longest({3, {5, 1, 1, 1}}, 3), 5);  // but no first one
  EXPECT_EQ(longest({1, {1, 2, 3}}, 1), 6);
  EXPECT_EQ(longest({70, std::vector<double>(70, 1)}, 70), 1);  // in 64 shares
}

// Where all threads are used although one has more than that.
const std::set<std::string> kUneven = {
    // 5, 10 and 14 panels of filters, which are shared whole
    "8 threads, 1 x conv2d N=1 C=832 H=7 W=7 K=160 kernel=1 stride=1 pad=0 dilation=1 groups=1",
    "4 threads, 1 x conv2d N=1 C=1280 H=8 W=8 K=320 kernel=1 stride=1 pad=0 dilation=1 groups=1",
    "32 threads, 10 x conv2d N=1 C=2048 H=8 W=8 K=448 kernel=1 stride=1 pad=0 dilation=1 groups=1",
    // 17 rows of output, which are shared whole; with smaller tasks the weights would be read more often
    "4 threads, 1 x conv2d N=1 C=96 H=35 W=35 K=96 kernel=3 stride=2 pad=0 dilation=1 groups=1",
    "8 threads, 1 x conv2d N=1 C=288 H=35 W=35 K=384 kernel=3 stride=2 pad=0 dilation=1 groups=1",
    "16 threads, 1 x conv2d N=1 C=288 H=35 W=35 K=384 kernel=3 stride=2 pad=0 dilation=1 groups=1",
    // 14 rows of 53 pixels
    "4 threads, 1 x conv2d N=1 C=32 H=27 W=27 K=128 kernel=1 stride=1 pad=0 dilation=1 groups=1",
};

class Networks : public testing::TestWithParam<const char*> {};

TEST_P(Networks, SplitTheirLayersEvenly) {
  if (!usable("avx512")) GTEST_SKIP() << "what is between the sections is compiled for avx512";
  std::ifstream file(std::string(AI3_SHAPES "/") + GetParam() + ".txt");
  ASSERT_TRUE(file) << "no layers of " << GetParam();
  double all[2] = {}, last[2][std::size(kThreads)] = {};  // work; its last thread's
  for (std::string line; std::getline(file, line);) {
    const size_t comment = line.find(" # x");
    if (comment == std::string::npos) continue;
    const bench::Shape layer = bench::read_shape(line.substr(0, comment));
    const double times = std::stod(line.substr(comment + 4));
    for (int b = 0; b < 2; b++) {
      for (const Section& s : split_of(on_images(layer, kImages[b]), 1).sections) all[b] += times * sum(s);
      for (size_t t = 0; t < std::size(kThreads); t++) {
        double largest = 0, mean = 0;
        int used = 0;
        for (const Section& s : split_of(on_images(layer, kImages[b]), kThreads[t]).sections) {
          largest += longest(s, team(s)), mean += sum(s) / team(s);
          used = std::max(used, team(s));
        }
        last[b][t] += times * largest;
        const std::string name =
            std::to_string(kThreads[t]) + " threads, " + std::to_string(kImages[b]) + " x " + line.substr(0, comment);
        const bool even = largest <= kMost * mean || used < kThreads[t];
        EXPECT_EQ(even, kUneven.count(name) == 0) << name << ": " << largest / mean << " of the mean";
      }
    }
  }
  // Nor are fewer threads used where it matters.
  for (size_t t = 0; t < std::size(kThreads); t++) {
    EXPECT_GE(all[0], .6 * kThreads[t] * last[0][t]) << kThreads[t] << " threads, one image";
    EXPECT_GE(all[1], .85 * kThreads[t] * last[1][t]) << kThreads[t] << " threads, ten images";
  }
}
INSTANTIATE_TEST_SUITE_P(, Networks,
                         testing::Values("alexnet", "densenet121", "googlenet", "inception_v3", "resnet152", "squeezenet1_1",
                                         "vgg16", "vit_b_16", "swin_b"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace

// Sizes, storage types, vectors and threads: what csrc/algos/core promises to the kernels.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "../../csrc/algos/core/machine.h"
#include "level.h"
#include "support.h"

extern "C" {
extern const LevelFunctions* const __start_ai3_test_levels[];
extern const LevelFunctions* const __stop_ai3_test_levels[];
}

namespace {
using namespace ai3;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST(Machine, NoiseDoesNotMoveTheBalance) {
  // One AVX-512 core here has 11.3 operations a byte, measured within a tenth or so.
  for (double ratio = 8; ratio < 15; ratio += 0.1) EXPECT_EQ(steady_balance({ratio * 20e9, 20e9}, 16), 8) << ratio;
  for (double ratio = 2.1; ratio < 7.9; ratio += 0.1) EXPECT_EQ(steady_balance({ratio * 20e9, 20e9}, 8), 4) << ratio;
  EXPECT_EQ(steady_balance({20 * 20e9, 20e9}, 16), 32) << "a machine that is another one is seen";
  EXPECT_EQ(steady_balance({1e9, 20e9}, 4), 2. / 64);
}

TEST(Checked, ProductsThatWrapSaturate) {
  EXPECT_EQ(checked_mul(int64_t{1} << 31, int64_t{1} << 31), int64_t{1} << 62);
  EXPECT_EQ(checked_mul(int64_t{1} << 32, int64_t{1} << 32), kOverflow);
  EXPECT_EQ(checked_mul(kOverflow, 0), kOverflow) << "an overflow may not be multiplied away";
  EXPECT_EQ(checked_add(INT64_MAX - 1, 5), kOverflow);
  EXPECT_EQ(checked_add(kOverflow, 1), kOverflow);
  EXPECT_EQ(checked_product({1 << 30, 1 << 30, 1 << 30}), kOverflow);
  EXPECT_EQ(checked_product({3, 5, 7}), 105);
  EXPECT_EQ(round_up(65, 64), 128);
  EXPECT_EQ(round_up(INT64_MAX - 2, 64), kOverflow);
  EXPECT_EQ(ceil_div(0, 7), 0);
  EXPECT_EQ(ceil_div(INT64_MAX, 2), int64_t{1} << 62);
}

TEST(Checked, WorkspaceGivesWhatWasStatedAndBorrowsTheRest) {
  alignas(64) char memory[192];
  Workspace w{memory, 192, 0, nullptr};
  EXPECT_EQ(workspace_bytes<float>(17), 128);
  EXPECT_EQ(static_cast<void*>(w.take<float>(17)), memory);
  EXPECT_EQ(static_cast<void*>(w.take<double>(8)), memory + 128);
  EXPECT_EQ(w.used, w.bytes);
  EXPECT_EQ(w.take<char>(65), nullptr);
  EXPECT_EQ(w.used, 192 + 128);
  EXPECT_EQ(w.take<double>(int64_t{1} << 61), nullptr);
  EXPECT_EQ(w.used, kOverflow);

  alignas(64) static char more[128];
  Workspace lends{memory, 64, 0, nullptr, [](Workspace&, int64_t bytes) { return bytes == 128 ? more : nullptr; }};
  EXPECT_EQ(static_cast<void*>(lends.take<char>(65)), more);
  EXPECT_GT(lends.used, lends.bytes);
}

// What the kernels' tests rest on.
TEST(GuardedDeathTest, TouchingOneByteTooManyIsAFault) {
  const Guarded at_end(100, Flush::end), at_begin(100, Flush::begin);
  at_end.as<char>()[99] = at_begin.as<char>()[0] = 1;
  EXPECT_DEATH(at_end.as<volatile char>()[100] = 1, "");
  EXPECT_DEATH(at_begin.as<volatile char>()[-1] = 1, "");
  at_end.protect();
  EXPECT_EQ(at_end.as<char>()[99], 1);
  EXPECT_DEATH(at_end.as<volatile char>()[0] = 1, "");
}

// The value of a 16-bit pattern, by the definition of its format.
double value(uint16_t bits, int exponent_bits, int fraction_bits) {
  const int exponent = bits >> fraction_bits & ((1 << exponent_bits) - 1), fraction = bits & ((1 << fraction_bits) - 1);
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const double sign = bits >> 15 ? -1 : 1;
  if (exponent == (1 << exponent_bits) - 1) return fraction ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - fraction_bits);
  return sign * std::ldexp((1 << fraction_bits) + fraction, exponent - bias - fraction_bits);
}
double value_of(bfloat16 x) { return value(x.bits, 8, 7); }
double value_of(float16 x) { return value(x.bits, 5, 10); }

bool same(double a, double b) { return std::isnan(a) ? std::isnan(b) : a == b && std::signbit(a) == std::signbit(b); }

template <class T>
T pattern(int bits) {
  return T{static_cast<uint16_t>(bits)};
}

// Each pattern is read exactly and written back; each float halfway between two neighbours goes to the even one, and the floats
// next to that to the nearer one.
template <class T, class Widen, class Narrow>
void every_pattern(const Widen& widen_all, const Narrow& narrow_all) {
  constexpr int kPatterns = 1 << 16;
  std::vector<T> patterns(kPatterns), back(kPatterns);
  std::vector<float> wide(kPatterns);
  for (int i = 0; i < kPatterns; i++) patterns[i] = pattern<T>(i);
  widen_all(patterns.data(), wide.data(), kPatterns);
  narrow_all(wide.data(), back.data(), kPatterns);
  std::vector<float> between;
  std::vector<double> expected;
  for (int i = 0; i < kPatterns; i++) {
    ASSERT_TRUE(same(wide[i], value_of(patterns[i]))) << "pattern " << i << " reads as " << wide[i];
    ASSERT_TRUE(same(value_of(back[i]), value_of(patterns[i]))) << "pattern " << i << " is written as " << back[i].bits;
    const double here = value_of(patterns[i]), next = value_of(pattern<T>((i + 1) & 0xffff));
    if (std::isnan(here) || std::isinf(here) || std::isnan(next) || (i & 0x7fff) == 0x7fff) continue;
    // The largest finite value's upper neighbour would be one step further, were it not infinity.
    const double before = value_of(pattern<T>(i - 1)), above = std::isinf(next) ? here + (here - before) : next;
    const float middle = static_cast<float>(here / 2 + above / 2);
    between.insert(between.end(),
                   {std::nextafter(middle, static_cast<float>(here)), middle, std::nextafter(middle, static_cast<float>(above))});
    expected.insert(expected.end(), {here, i % 2 ? next : here, next});
  }
  std::vector<T> rounded(between.size());
  narrow_all(between.data(), rounded.data(), static_cast<int64_t>(between.size()));
  for (size_t i = 0; i < between.size(); i++)
    ASSERT_TRUE(same(value_of(rounded[i]), expected[i]))
        << between[i] << " rounds to " << value_of(rounded[i]) << ", not " << expected[i];
}

TEST(StorageTypes, ScalarConversionsOfEveryPattern) {
  auto scalar_widen = [](const auto* in, float* out, int64_t n) {
    for (int64_t i = 0; i < n; i++) out[i] = widen(in[i]);
  };
  auto scalar_narrow = [](const float* in, auto* out, int64_t n) {
    for (int64_t i = 0; i < n; i++) narrow(in[i], out[i]);
  };
  every_pattern<bfloat16>(scalar_widen, scalar_narrow);
  every_pattern<float16>(scalar_widen, scalar_narrow);
}

TEST(StorageTypes, FloatsBeyondTheRangeOfFloat16) {
  for (float f : {65520.0f, 1e6f, kInfinity}) EXPECT_EQ(narrowed<float16>(f).bits, 0x7c00);
  for (float f : {-65520.0f, -kInfinity}) EXPECT_EQ(narrowed<float16>(f).bits, 0xfc00);
  EXPECT_EQ(narrowed<float16>(65519.0f).bits, 0x7bff);
  EXPECT_EQ(narrowed<float16>(1e-30f).bits, 0);
  EXPECT_EQ(narrowed<float16>(-1e-30f).bits, 0x8000);
  EXPECT_TRUE(std::isnan(value_of(narrowed<float16>(NAN))));
  EXPECT_TRUE(std::isnan(value_of(narrowed<bfloat16>(NAN))));
}

class Level : public testing::TestWithParam<const LevelFunctions*> {};

TEST_P(Level, VectorConversionsOfEveryPattern) {
  every_pattern<bfloat16>(GetParam()->widen_bfloat16, GetParam()->narrow_bfloat16);
  every_pattern<float16>(GetParam()->widen_float16, GetParam()->narrow_float16);
}

TEST_P(Level, PartialLoadsAndStoresTouchNothingElse) {
  for (Flush flush : {Flush::end, Flush::begin})
    for (int64_t count = 1; count < 40; count++) {
      Guarded in(count * 2, flush), middle(count * 4, flush), out(count * 2, flush);
      for (int64_t i = 0; i < count; i++) in.as<bfloat16>()[i] = narrowed<bfloat16>(static_cast<float>(i - 7));
      in.protect();
      GetParam()->widen_bfloat16(in.as<bfloat16>(), middle.as<float>(), count);
      GetParam()->narrow_float16(middle.as<float>(), out.as<float16>(), count);
      for (int64_t i = 0; i < count; i++) EXPECT_EQ(widen(out.as<float16>()[i]), static_cast<float>(i - 7));
    }
}

TEST_P(Level, ReluKeepsNanAndMinusZero) {
  const float in[] = {-1, 2, NAN, -0.0f, 0.0f, kInfinity, -kInfinity, -1e-40f, 3};
  float out[std::size(in)];
  GetParam()->relu(in, out, std::size(in));
  const float expected[] = {0, 2, NAN, -0.0f, 0.0f, kInfinity, 0, 0, 3};
  for (size_t i = 0; i < std::size(in); i++) EXPECT_TRUE(same(out[i], expected[i])) << "relu(" << in[i] << ") is " << out[i];
}

TEST_P(Level, ParallelLoopsVisitEachIndexOnce) {
  for (int threads : {1, 2, 3, 7, 70})
    for (int64_t count : {0, 1, 2, 5, 64, 1000})
      for (int64_t grain : {0, 1, 3, 100}) {
        std::vector<int> counts(count + 1);
        int thread_at_most = 0;
        GetParam()->parallel(threads, count, grain, counts.data(), &thread_at_most);
        EXPECT_LT(thread_at_most, threads);
        for (int64_t i = 0; i < count; i++) EXPECT_EQ(counts[i], 1) << "index " << i << " of " << count;
      }
}

#ifndef __SANITIZE_THREAD__  // then each loop has threads of its own
TEST_P(Level, ThreadsThatALoopHasNoWorkForStay) {
  auto threads = [] {
    std::set<std::string> ids;
    for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task")) ids.insert(thread.path().filename());
    return ids;
  };
  auto loop = [](int64_t count) {
    std::vector<int> counts(count);
    int thread_at_most = 0;
    GetParam()->parallel(8, count, 0, counts.data(), &thread_at_most);
  };
  std::set<std::string> before, after;
  std::jthread([&] {  // whose OpenMP threads are its own
    loop(8), before = threads();
    loop(2), loop(8), after = threads();
  })
      .join();
  for (const std::string& id : after) EXPECT_TRUE(before.count(id)) << "thread " << id << " was started again";
}
#endif

std::vector<const LevelFunctions*> levels() {
  std::vector<const LevelFunctions*> found;
  for (auto l = __start_ai3_test_levels; l != __stop_ai3_test_levels; l++)
    if (usable((*l)->level)) found.push_back(*l);
  return found;
}
INSTANTIATE_TEST_SUITE_P(, Level, testing::ValuesIn(levels()), [](const auto& info) { return std::string(info.param->level); });

}  // namespace

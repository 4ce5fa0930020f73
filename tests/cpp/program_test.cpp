// A program's text, and the places of its values: what of csrc/ops/program knows neither PyTorch nor kernels.
#include <gtest/gtest.h>

#include <random>

#include "../../csrc/algos/core/checked.h"
#include "../../csrc/ops/program/arena.h"
#include "../../csrc/ops/program/text.h"

namespace ai3::ops::program {
namespace {

// The bytes that `place` says, after a look at every pair of blocks that are needed at the same time.
int64_t placed(std::vector<Block> blocks) {
  std::vector<int64_t> offsets(blocks.size(), -1);
  for (size_t i = 0; i < blocks.size(); i++) blocks[i].offset = &offsets[i];
  const std::vector<Block> given = blocks;
  const int64_t bytes = place(blocks);
  for (size_t i = 0; i < given.size(); i++) {
    EXPECT_GE(offsets[i], 0);
    EXPECT_LE(offsets[i] + given[i].bytes, bytes);
    for (size_t j = 0; j < i; j++) {
      const bool together = given[i].first <= given[j].last && given[j].first <= given[i].last;
      const bool apart = offsets[i] + given[i].bytes <= offsets[j] || offsets[j] + given[j].bytes <= offsets[i];
      EXPECT_TRUE(!together || apart) << i << " and " << j;
    }
  }
  return bytes;
}
Block block(int64_t bytes, int first, int last) { return {bytes, first, last, nullptr}; }

TEST(Arena, ReusesWhatIsFree) {
  EXPECT_EQ(placed({}), 0);
  EXPECT_EQ(placed({block(64, 0, 1)}), 64);
  EXPECT_EQ(placed({block(64, 0, 1), block(64, 2, 3), block(64, 4, 4)}), 64);                     // one after the other
  EXPECT_EQ(placed({block(64, 0, 1), block(64, 1, 2), block(64, 2, 3)}), 128);                    // a chain of steps
  EXPECT_EQ(placed({block(100, 0, 9), block(30, 0, 1), block(30, 2, 3), block(10, 2, 9)}), 140);  // side by side
}

TEST(Arena, TakesTheSmallestGapThatFits) {
  // Where the blocks of 100 and 60 are no longer needed are gaps, kept apart by those of 90 and 55.
  int64_t at[5];
  std::vector<Block> blocks = {
      {100, 0, 1, &at[0]}, {90, 0, 9, &at[1]}, {60, 0, 1, &at[2]}, {55, 0, 9, &at[3]}, {50, 2, 3, &at[4]}};
  EXPECT_EQ(place(blocks), 305);
  EXPECT_EQ(at[1], 100);
  EXPECT_EQ(at[3], 250);
  EXPECT_EQ(at[4], 190);  // not in the larger one at 0, and not behind all
}

TEST(Arena, MostAtOnce) {
  EXPECT_EQ(most_at_once({}), 0);
  EXPECT_EQ(most_at_once({block(10, 0, 3), block(20, 2, 4), block(40, 4, 5), block(1, 9, 9)}), 60);
  EXPECT_EQ(most_at_once({block(kOverflow, 0, 1), block(kOverflow, 0, 1)}), kOverflow);
}

TEST(Arena, RandomBlocks) {
  std::mt19937 random(7);
  for (int round = 0; round < 200; round++) {
    std::vector<Block> blocks;
    for (int i = 0, count = static_cast<int>(random() % 20); i < count; i++) {
      const int first = static_cast<int>(random() % 12);
      blocks.push_back(block(64 * static_cast<int64_t>(random() % 9), first, first + static_cast<int>(random() % 5)));
    }
    int64_t sum = 0;
    for (const Block& b : blocks) sum += b.bytes;
    const int64_t bytes = placed(blocks);
    EXPECT_GE(bytes, most_at_once(blocks));
    EXPECT_LE(bytes, sum);
  }
}

TEST(Arena, RefusesWhatCannotBeAddressed) {
  int64_t at[2];
  std::vector<Block> blocks = {{int64_t{1} << 61, 0, 1, &at[0]}, {int64_t{1} << 61, 0, 1, &at[1]}};
  EXPECT_THROW(place(blocks), std::runtime_error);
  blocks = {{kOverflow, 0, 1, &at[0]}, {kOverflow, 0, 1, &at[1]}};
  EXPECT_THROW(place(blocks), std::runtime_error);
}

TEST(ProgramText, Reads) {
  const Program program = parse(
      "%0 = input float32 4\n\n"
      "%1 = conv2d_winograd_f4 %0 weight=$0:64,32,3,3 bias=$4 stride=1,2 alpha=-0.5 residual=%0 activation=relu\n"
      "%2 = concat %1 %0 1\n"
      "return %2:channels_last %1\n");
  ASSERT_EQ(program.lines.size(), 3u);
  EXPECT_EQ(program.inputs, 1);
  EXPECT_EQ(program.constants, 5);
  EXPECT_EQ(program.lines[0].words, (std::vector<std::string>{"float32", "4"}));
  const Line& line = program.lines[1];
  EXPECT_EQ(line.operation, "conv2d_winograd_f4");
  EXPECT_EQ(line.number, 3);  // with the empty one
  EXPECT_EQ(line.operands, std::vector<int>{0});
  EXPECT_EQ(line.constant("weight"), 0);
  EXPECT_EQ(line.constant_sizes("weight", 4), (std::vector<int64_t>{64, 32, 3, 3}));
  EXPECT_EQ(line.constant("bias"), 4);
  EXPECT_EQ(line.constant("slope"), -1);
  EXPECT_EQ(line.numbers("stride", 2), (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(line.real("alpha"), -0.5);
  EXPECT_EQ(line.value("residual"), 0);
  EXPECT_TRUE(line.has("activation"));
  EXPECT_FALSE(line.has("slope"));
  EXPECT_EQ(line.word("slope", "none"), "none");
  EXPECT_EQ(program.lines[2].operands, (std::vector<int>{1, 0}));
  EXPECT_EQ(program.lines[2].words, std::vector<std::string>{"1"});
  ASSERT_EQ(program.results.size(), 2u);
  EXPECT_EQ(program.results[0].value, 2);
  EXPECT_TRUE(program.results[0].channels_last);
  EXPECT_FALSE(program.results[1].channels_last);
}

// What `function` throws.
template <class F>
std::string thrown(F function) {
  try {
    function();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "nothing";
}

TEST(ProgramText, SaysWhatIsWrongWithALine) {
  const std::pair<std::string, std::string> wrong[] = {
      {"", "needs a text that ends with return"},
      {"%0 = input float32 4", "needs a text that ends with return"},
      {"%1 = input float32 4", "values are numbered in order: this is %0"},
      {"0 = input", "needs a value, as %3, got '0'"},
      {"%x = input", "needs a value, as %3, got '%x'"},
      {"%0 = ", "needs %<number> = <operation> ..."},
      {"%0 input", "needs %<number> = <operation> ..."},
      {"%0 = relu %0", "there is no value %0 yet"},
      {"%0 = input\n%1 = add %0 other=%1", "there is no value %1 yet"},
      {"%0 = input\n%1 = relu %0\n%2 = input", "inputs come before all steps"},
      {"%0 = input\n%1 = linear %0 weight=$-1", "needs a constant, as $3, got '$-1'"},
      {"%0 = input\nreturn", "needs a value"},
      {"%0 = input\nreturn %1", "there is no value %1"},
      {"%0 = input\nreturn %0:nchw", "needs channels_last or contiguous behind a value, got 'nchw'"},
      {"%0 = input\nreturn %0\n%1 = relu %0", "nothing may follow return"},
  };
  for (const auto& [text, reason] : wrong) {
    const std::string message = thrown([&] { parse(text); });
    EXPECT_NE(message.find(reason), std::string::npos) << message << " where wanted: " << reason;
    EXPECT_EQ(message.rfind("ai3::_program: ", 0), 0u) << message;
  }
}

TEST(ProgramText, SaysWhatIsWrongWithAnOption) {
  const Line line = parse("%0 = input a=1,2 b=1,x c= d=0.5y e=$0 f=9223372036854775808\nreturn %0").lines[0];
  EXPECT_EQ(thrown([&] { line.word("z"); }).find("ai3::_program: line 1, '%0 = input"), 0u);
  EXPECT_NE(thrown([&] { line.word("z"); }).find("needs z"), std::string::npos);
  EXPECT_NE(thrown([&] { line.numbers("a", 3); }).find("needs 3 numbers as a, got '1,2'"), std::string::npos);
  for (const char* name : {"b", "c", "f"})
    EXPECT_NE(thrown([&] { line.list(name); }).find(std::string("needs numbers as ") + name), std::string::npos) << name;
  EXPECT_NE(thrown([&] { line.real("d"); }).find("needs a number as d, got '0.5y'"), std::string::npos);
  EXPECT_NE(thrown([&] { line.constant_sizes("e", 4); }).find("needs sizes with e"), std::string::npos);
  EXPECT_NE(thrown([&] { line.value("e"); }).find("needs a value, as %3, got '$0'"), std::string::npos);
}

}  // namespace
}  // namespace ai3::ops::program

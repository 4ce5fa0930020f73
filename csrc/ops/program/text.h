// A program's text: one step a line, its values numbered in order (docs/decisions/program.md).
//
//   %0 = input float32 4
//   %1 = conv2d_winograd_f4 %0 weight=$0:64,64,3,3 bias=$1 stride=1,1 padding=1,1 dilation=1,1 groups=1 activation=relu
//   %2 = concat %1 %0
//   return %2:channels_last
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace ai3::ops::program {

struct Line {
  int number;  // from 1
  std::string text, operation;
  std::vector<int> operands;
  std::vector<std::string> words;  // behind the operands, without "="
  std::vector<std::pair<std::string, std::string>> options;

  // Throws with the line and the reason.
  [[noreturn]] void fail(const std::string& reason) const;
  void check(bool ok, const std::string& reason) const {
    if (!ok) fail(reason);
  }
  bool has(const std::string& name) const { return find(name) != nullptr; }
  const std::string& word(const std::string& name) const;
  std::string word(const std::string& name, const std::string& otherwise) const;
  int64_t number_of(const std::string& name) const;
  double real(const std::string& name) const;
  std::vector<int64_t> list(const std::string& name) const;
  std::vector<int64_t> numbers(const std::string& name, size_t count) const;
  int value(const std::string& name) const;     // "%3"
  int constant(const std::string& name) const;  // "$3" or "$3:..."; -1 where there is none
  std::vector<int64_t> constant_sizes(const std::string& name, size_t count) const;

 private:
  const std::string* find(const std::string& name) const;
};

struct Result {
  int value;
  bool channels_last;
};
struct Program {
  std::vector<Line> lines;  // line i makes value i
  std::vector<Result> results;
  int inputs = 0;  // the first lines
  int constants = 0;
};
Program parse(const std::string& text);

}  // namespace ai3::ops::program

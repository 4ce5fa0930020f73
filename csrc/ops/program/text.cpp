#include "text.h"

#include <charconv>
#include <sstream>
#include <stdexcept>

namespace ai3::ops::program {
namespace {

std::vector<int64_t> split_numbers(const Line& line, const std::string& name, const std::string& text) {
  std::vector<int64_t> numbers;
  const char *at = text.data(), *const end = at + text.size();
  while (true) {
    int64_t number = 0;
    const auto [rest, error] = std::from_chars(at, end, number);
    line.check(error == std::errc() && (rest == end || *rest == ','), "needs numbers as " + name + ", got '" + text + "'");
    numbers.push_back(number);
    if (rest == end) return numbers;
    at = rest + 1;
  }
}

// "<mark><number>".
int reference(const Line& line, char mark, const std::string& text) {
  int number = -1;
  const char* const end = text.data() + text.size();
  const bool marked = !text.empty() && text[0] == mark;
  const auto [rest, error] = std::from_chars(text.data() + (marked ? 1 : 0), end, number);
  line.check(marked && error == std::errc() && rest == end && number >= 0 && number < 1 << 20,
             std::string("needs ") + (mark == '%' ? "a value, as %3" : "a constant, as $3") + ", got '" + text + "'");
  return number;
}

}  // namespace

void Line::fail(const std::string& reason) const {
  throw std::runtime_error("ai3::_program: line " + std::to_string(number) + ", '" + text + "': " + reason);
}
const std::string* Line::find(const std::string& name) const {
  for (const auto& [key, value] : options)
    if (key == name) return &value;
  return nullptr;
}
const std::string& Line::word(const std::string& name) const {
  const std::string* found = find(name);
  check(found != nullptr, "needs " + name);
  return *found;
}
std::string Line::word(const std::string& name, const std::string& otherwise) const {
  const std::string* found = find(name);
  return found ? *found : otherwise;
}
std::vector<int64_t> Line::list(const std::string& name) const { return split_numbers(*this, name, word(name)); }
std::vector<int64_t> Line::numbers(const std::string& name, size_t count) const {
  const std::vector<int64_t> list = split_numbers(*this, name, word(name));
  check(list.size() == count, "needs " + std::to_string(count) + " numbers as " + name + ", got '" + word(name) + "'");
  return list;
}
int64_t Line::number_of(const std::string& name) const { return numbers(name, 1)[0]; }
double Line::real(const std::string& name) const {
  const std::string& text = word(name);
  double number = 0;
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  check(error == std::errc() && rest == text.data() + text.size(), "needs a number as " + name + ", got '" + text + "'");
  return number;
}
int Line::value(const std::string& name) const { return reference(*this, '%', word(name)); }
int Line::constant(const std::string& name) const {
  const std::string* found = find(name);
  return found ? reference(*this, '$', found->substr(0, found->find(':'))) : -1;
}
std::vector<int64_t> Line::constant_sizes(const std::string& name, size_t count) const {
  const std::string& text = word(name);
  const size_t colon = text.find(':');
  check(colon != std::string::npos, "needs sizes with " + name + ", as $3:64,32,3,3");
  const std::vector<int64_t> sizes = split_numbers(*this, name, text.substr(colon + 1));
  check(sizes.size() == count, "needs " + std::to_string(count) + " sizes with " + name + ", got '" + text + "'");
  return sizes;
}

Program parse(const std::string& text) {
  Program program;
  std::istringstream stream(text);
  std::string row;
  bool returned = false;
  for (int number = 1; std::getline(stream, row); number++) {
    Line line{number, row, {}, {}, {}, {}};
    std::istringstream parts(row);
    std::string part;
    if (!(parts >> part)) continue;
    line.check(!returned, "nothing may follow return");
    if (part == "return") {
      returned = true;
      while (parts >> part) {
        const size_t colon = part.find(':');
        const std::string layout = colon == std::string::npos ? "" : part.substr(colon + 1);
        line.check(layout.empty() || layout == "channels_last" || layout == "contiguous",
                   "needs channels_last or contiguous behind a value, got '" + layout + "'");
        const int value = reference(line, '%', part.substr(0, colon));
        line.check(value < static_cast<int>(program.lines.size()), "there is no value %" + std::to_string(value));
        program.results.push_back({value, layout == "channels_last"});
      }
      line.check(!program.results.empty(), "needs a value");
      continue;
    }
    const int made = reference(line, '%', part);
    line.check(made == static_cast<int>(program.lines.size()),
               "values are numbered in order: this is %" + std::to_string(program.lines.size()));
    line.check(parts >> part && part == "=" && parts >> line.operation, "needs %<number> = <operation> ...");
    while (parts >> part) {
      const size_t equals = part.find('=');
      if (equals != std::string::npos) {
        line.options.emplace_back(part.substr(0, equals), part.substr(equals + 1));
        if (part[equals + 1] == '$')
          program.constants = std::max(program.constants, line.constant(line.options.back().first) + 1);
        if (part[equals + 1] == '%') {
          const int value = line.value(line.options.back().first);
          line.check(value < made, "there is no value %" + std::to_string(value) + " yet");
        }
      } else if (part[0] == '%') {
        line.operands.push_back(reference(line, '%', part));
        line.check(line.operands.back() < made, "there is no value " + part + " yet");
      } else {
        line.words.push_back(part);
      }
    }
    if (line.operation == "input") {
      line.check(program.inputs == made, "inputs come before all steps");
      program.inputs++;
    }
    program.lines.push_back(std::move(line));
  }
  if (!returned) throw std::runtime_error("ai3::_program: needs a text that ends with return");
  return program;
}

}  // namespace ai3::ops::program

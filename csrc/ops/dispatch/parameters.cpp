// What an algorithm's record states of parameters of its own.
#include <charconv>
#include <sstream>

#include "registry.h"

namespace ai3::ops {
namespace {

[[noreturn]] void fail(const std::string& text, const char* needs) {
  throw std::runtime_error("ai3: the parameter '" + text + "' " + needs);
}
std::string trimmed(const std::string& text) {
  const size_t first = text.find_first_not_of(' '), last = text.find_last_not_of(' ');
  return first == std::string::npos ? "" : text.substr(first, last + 1 - first);
}
std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, at);) parts.push_back(trimmed(part));
  return parts;
}
template <class Number>
Number number_of(const std::string& text, const std::string& of) {
  Number value{};
  const auto [rest, error] = std::from_chars(of.data(), of.data() + of.size(), value);
  if (error != std::errc() || rest != of.data() + of.size()) fail(text, "needs a number as its default");
  return value;
}

Parameter parsed(const std::string& text) {
  const size_t space = text.find(' '), equals = text.find('=');
  if (text.rfind("Tensor ", 0) == 0 && equals == std::string::npos)
    return {Parameter::Kind::tensor, trimmed(text.substr(space)), text, {}, 0};
  if (space == std::string::npos || equals == std::string::npos || equals < space)
    fail(text, "needs a type, a name and a default");
  const std::string type = text.substr(0, space), otherwise = text.substr(equals + 1);
  Parameter p{Parameter::Kind::whole, text.substr(space + 1, equals - space - 1), text, {}, 0};
  if (type == "int") {
    p.otherwise = number_of<int64_t>(text, otherwise);
  } else if (type == "float") {
    p.kind = Parameter::Kind::real;
    const double value = number_of<double>(text, otherwise);
    std::memcpy(&p.otherwise, &value, sizeof(value));
  } else if (type == "bool") {
    p.kind = Parameter::Kind::flag;
    if (otherwise != "True" && otherwise != "False") fail(text, "needs True or False as its default");
    p.otherwise = otherwise == "True";
  } else if (type == "Tensor?") {
    p.kind = Parameter::Kind::optional_tensor;
    if (otherwise != "None") fail(text, "needs None as its default");
  } else if (type.rfind("str(", 0) == 0 && type.back() == ')') {
    p.kind = Parameter::Kind::word;
    p.words = split(type.substr(4, type.size() - 5), '|');
    p.schema = "str " + p.name + "=\"" + otherwise + "\"";
    p.otherwise = word_of(p, otherwise);
  } else {
    fail(text, "needs one of the types int, float, bool, str(<word>|<word>...), Tensor, Tensor?");
  }
  return p;
}

}  // namespace

std::vector<Parameter> parameters_of(const char* text) {
  std::vector<Parameter> all;
  for (const std::string& part : split(text ? text : "", ',')) all.push_back(parsed(part));
  if (all.size() > Parameters::kAtMost) fail(text, "is one of too many");
  return all;
}

int64_t word_of(const Parameter& parameter, const std::string& word) {
  const auto found = std::find(parameter.words.begin(), parameter.words.end(), word);
  if (found != parameter.words.end()) return found - parameter.words.begin();
  std::string words;
  for (const std::string& w : parameter.words) words += (words.empty() ? "'" : ", '") + w + "'";
  throw std::runtime_error("needs " + parameter.name + " to be one of " + words + ", got '" + word + "'");
}

}  // namespace ai3::ops

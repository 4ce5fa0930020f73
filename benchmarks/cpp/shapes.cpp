#include "shapes.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <stdexcept>

namespace ai3::bench {

std::vector<int64_t> Shape::pair(const char* name) const {
  const auto it = values.find(name);
  if (it == values.end()) throw std::runtime_error("benchmark shape: " + operation + " without " + name);
  return it->second.size() == 1 ? std::vector<int64_t>{it->second[0], it->second[0]} : it->second;
}

Shape read_shape(const std::string& line) {
  Shape shape;
  std::istringstream words(line);
  words >> shape.operation;
  for (std::string word; words >> word;) {
    const size_t equals = word.find('=');
    if (equals == std::string::npos) throw std::runtime_error("benchmark shape: cannot read '" + word + "' in " + line);
    std::istringstream numbers(word.substr(equals + 1));
    for (std::string number; std::getline(numbers, number, ',');)
      shape.values[word.substr(0, equals)].push_back(std::stoll(number));
  }
  return shape;
}

std::vector<Shape> read_shapes(const std::string& directory) {
  std::vector<std::filesystem::path> files;
  for (const auto& file : std::filesystem::directory_iterator(directory))
    if (file.path().extension() == ".txt") files.push_back(file.path());
  std::sort(files.begin(), files.end());
  std::vector<Shape> shapes;
  std::set<std::string> seen;
  for (const auto& file : files) {
    std::ifstream in(file);
    for (std::string line; std::getline(in, line);) {
      line = line.substr(0, line.find('#'));
      line.erase(line.find_last_not_of(" \r") + 1);
      if (!line.empty() && seen.insert(line).second) shapes.push_back(read_shape(line));
    }
  }
  return shapes;
}

}  // namespace ai3::bench

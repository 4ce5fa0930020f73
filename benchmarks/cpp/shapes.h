// Layers of real networks, read from benchmarks/shapes/*.txt (see benchmarks/shapes.py).
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace ai3::bench {

// One line: an operation and its sizes, as in "conv2d N=1 C=64 H=56 W=56 K=64 kernel=3 stride=1 pad=1 dilation=1 groups=1".
struct Shape {
  std::string operation;
  std::map<std::string, std::vector<int64_t>> values;

  int64_t operator[](const char* name) const { return pair(name)[0]; }
  // A value for both dimensions: "3" stands for both, "1,7" of each.
  std::vector<int64_t> pair(const char* name) const;
};

// One line of a file, without its comment; throws std::runtime_error on one that cannot be read.
Shape read_shape(const std::string& line);
// The distinct lines of every file in `directory`, in order.
std::vector<Shape> read_shapes(const std::string& directory);

}  // namespace ai3::bench

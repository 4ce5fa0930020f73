// How a layer's kernel splits its work, asked of kernels that compute nothing (level `splits`): so it is known for more threads
// than this machine has cores.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "../../benchmarks/cpp/shapes.h"

namespace ai3::splits_test {

// A parallel section: what its items take, in vectors multiplied or about as much work, and how many threads may take them.
struct Section {
  int threads;
  std::vector<double> items;
};
// Those since the last call.
std::vector<Section> take_sections();

// What a section's last thread to be done has taken when `team` threads take it as parallel_for lets them, each item in the time
// that its size says.
double longest(const Section& section, int team);
double sum(const Section& section);
// How many threads parallel_for gives it.
int team(const Section& section);

struct Split {
  std::string algorithm;
  std::vector<Section> sections;
};
// Of the algorithm that `default` chooses for the layer in float32, channels_last, with `threads` threads, weights packed.
Split split_of(const bench::Shape& layer, int threads);
// The layer on n images.
bench::Shape on_images(bench::Shape layer, int64_t n);

}  // namespace ai3::splits_test

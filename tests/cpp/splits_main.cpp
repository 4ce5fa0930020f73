// For benchmarks/threads.py: reads layers as the lines of benchmarks/shapes and writes, for each and each number of threads
// given, one line: algorithm, then for each parallel section its threads, what all its items take together, and its last thread.
#include <cstdlib>
#include <iostream>
#include <string>

#include "splits.h"

int main(int count, char** arguments) {
  using namespace ai3::splits_test;
  for (std::string line; std::getline(std::cin, line);)
    for (int i = 1; i < count; i++) {
      const Split split = split_of(ai3::bench::read_shape(line), std::atoi(arguments[i]));
      std::cout << split.algorithm;
      for (const Section& s : split.sections)
        std::cout << ' ' << s.items.size() << ' ' << team(s) << ' ' << sum(s) << ' ' << longest(s, team(s));
      std::cout << '\n';
    }
}

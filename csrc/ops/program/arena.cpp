#include "arena.h"

#include <algorithm>
#include <stdexcept>

#include "../../algos/core/checked.h"

namespace ai3::ops::program {

int64_t most_at_once(const std::vector<Block>& blocks) {
  int64_t most = 0;
  for (const Block& begin : blocks) {  // the most is needed where one begins
    int64_t live = 0;
    for (const Block& b : blocks)
      if (b.first <= begin.first && begin.first <= b.last) live = checked_add(live, b.bytes);
    most = std::max(most, live);
  }
  return most;
}

// Each block in the smallest gap that it fits, among those that are needed at the same time; the largest first (Pisarchyk & Lee,
// "Efficient memory management for deep neural net inference", 2020, greedy by size).
int64_t place(std::vector<Block>& blocks) {
  int64_t bytes = 0;
  std::stable_sort(blocks.begin(), blocks.end(), [](const Block& a, const Block& b) { return a.bytes > b.bytes; });
  for (size_t i = 0; i < blocks.size(); i++) {
    Block& b = blocks[i];
    std::vector<const Block*> beside;
    for (size_t j = 0; j < i; j++)
      if (blocks[j].first <= b.last && b.first <= blocks[j].last) beside.push_back(&blocks[j]);
    std::sort(beside.begin(), beside.end(), [](const Block* a, const Block* c) { return a->placed < c->placed; });
    int64_t end = 0, best = -1, smallest = kOverflow;
    for (const Block* other : beside) {
      if (const int64_t gap = other->placed - end; gap >= b.bytes && gap < smallest) best = end, smallest = gap;
      end = std::max(end, checked_add(other->placed, other->bytes));
    }
    b.placed = *b.offset = best >= 0 ? best : end;
    bytes = std::max(bytes, checked_add(b.placed, b.bytes));
  }
  if (bytes >= int64_t{1} << 62) throw std::runtime_error("ai3::_program: needs more memory than can be addressed");
  return bytes;
}

}  // namespace ai3::ops::program

// Where a program's values and workspaces lie in the one block of memory that a call takes.
#pragma once
#include <cstdint>
#include <vector>

namespace ai3::ops::program {

struct Block {
  int64_t bytes;
  int first, last;  // steps that need it
  int64_t* offset;  // where `place` writes its place
  int64_t placed = -1;
};

// The most that is needed at one time, which no placement goes below.
int64_t most_at_once(const std::vector<Block>& blocks);
// Gives each block its place, apart from all that are needed at the same time; returns the bytes of the whole.
int64_t place(std::vector<Block>& blocks);

}  // namespace ai3::ops::program

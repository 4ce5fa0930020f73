// The values of a program, and where they lie: each in memory of its own, in a part of a concatenation, or as a view of another.
#pragma once
#include <deque>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "../../algos/core/dtype.h"
#include "../../algos/core/problem.h"

namespace ai3::ops::program {

using Sizes = std::vector<int64_t>;
inline constexpr int kNever = std::numeric_limits<int>::max();

// Dimensions from the outermost in memory to the innermost: as they come, or those of images with their channels innermost.
Sizes natural_order(size_t rank);
Sizes image_order();
// Strides of a dense tensor.
Sizes dense_strides(const Sizes& sizes, const Sizes& order);
// Whether dense tensors of both orders are the same memory: dimensions of one element may stand anywhere.
bool same_order(const Sizes& sizes, const Sizes& a, const Sizes& b);
int64_t count_of(const Sizes& sizes);
// The elements from one row to the next where those of the innermost dimension are neighbours and all others count rows.
std::optional<int64_t> rows_apart(const Sizes& sizes, const Sizes& strides, const Sizes& order);
// Strides that the same elements have with other sizes, where there are such.
std::optional<Sizes> reshaped(const Sizes& sizes, const Sizes& strides, const Sizes& to);

enum class Home { arena, input, output, constant };

struct Value {
  Sizes sizes;
  DType dtype;
  Sizes order;        // of the memory that it is written to
  int parent = -1;    // a value in whose memory this lies
  int dim = 0;        // as a part of a concatenation along this dimension,
  int64_t start = 0;  // from here on
  bool view = false;  // or with these strides and offset
  Sizes strides;      // also of memory of its own
  int64_t offset = 0;
  // Of memory of its own:
  Home home = Home::arena;
  int index = 0;                  // of the input, output or constant
  int first = kNever, last = -1;  // steps that need it
  int64_t place = 0;              // bytes, in the arena

  int64_t innermost() const { return sizes[static_cast<size_t>(order.back())]; }
  int64_t rows() const { return innermost() ? count_of(sizes) / innermost() : 0; }
};

// In whose memory elements lie, from where on, and how far apart.
struct Position {
  int root;
  int64_t offset;
  Sizes strides;
};

class Values {
 public:
  Value& at(int value) { return all_[static_cast<size_t>(value)]; }
  const Value& at(int value) const { return all_[static_cast<size_t>(value)]; }
  int count() const { return static_cast<int>(all_.size()); }
  std::deque<Value>& all() { return all_; }
  // Dense, in memory of its own; throws where that is too large.
  int add(Sizes sizes, DType dtype, Sizes order);
  // The same elements seen otherwise.
  int add_view(int of, Sizes sizes, Position position);
  Position position(int value) const;
  bool is_dense(int value, const Sizes& order) const;

 private:
  std::deque<Value> all_;  // references stay valid as values are added
};

}  // namespace ai3::ops::program

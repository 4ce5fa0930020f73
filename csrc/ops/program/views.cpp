// Steps that move nothing where they need not: the same elements with other sizes, in another order, or a part of them.
#include <algorithm>
#include <numeric>

#include "step.h"

namespace ai3::ops::program {
namespace {

// reshape %x sizes=0,-1,64: 0 keeps a dimension, -1 is what is left. A view where the elements lie so; else one copy, of an image
// with order=channels_last in that order.
struct ReshapeStep : Step {
  Sizes from, to;

  explicit ReshapeStep(Reader& r) {
    r.needs_operands(1);
    const Value& x = r.any_operand(0);
    from = x.sizes, to = r.line.list("sizes");
    int64_t rest = count_of(from), open = -1;
    for (size_t d = 0; d < to.size(); d++) {
      if (to[d] == 0) r.line.check(d < from.size(), "has no dimension to keep, got " + to_string(from)), to[d] = from[d];
      r.line.check(to[d] >= -1, "needs sizes of at least -1, got " + to_string(to));
      if (to[d] == -1) r.line.check(open < 0, "needs one open size at most"), open = static_cast<int64_t>(d);
      if (to[d] > 0) r.line.check(rest % to[d] == 0, "needs sizes that hold all elements, got " + to_string(from)), rest /= to[d];
    }
    if (open >= 0) to[static_cast<size_t>(open)] = rest;
    r.line.check(count_of(to) == count_of(from), "needs sizes that hold all elements, got " + to_string(from));
    const bool image = r.line.word("order", "contiguous") == "channels_last";
    r.line.check(!image || to.size() == 4, "needs four sizes for an image");
    const DType dtype = x.dtype;
    r.output(to, dtype, image ? image_order() : natural_order(to.size()));
  }
  ReshapeStep() = default;
  void emit(Emitter& e) override { emit_of(e, e.values().position(e.operand(0)), from); }
  // Of elements that lie so and have `sizes`.
  void emit_of(Emitter& e, Position x, const Sizes& sizes) const {
    if (auto strides = reshaped(sizes, x.strides, to)) return e.view({x.root, x.offset, std::move(*strides)});
    const int seen = e.values().add_view(x.root, sizes, std::move(x));
    const Position y = e.values().position(e.value);
    if (auto strides = reshaped(to, y.strides, sizes))  // y's memory, seen with x's sizes
      return e.copy(seen, e.values().add_view(y.root, sizes, {y.root, y.offset, std::move(*strides)}));
    const int dense = e.values().add(sizes, e.of(e.value).dtype, natural_order(sizes.size()));
    e.copy(seen, dense);
    const Position whole = e.values().position(dense);
    e.copy(e.values().add_view(dense, to, {whole.root, whole.offset, dense_strides(to, natural_order(to.size()))}), e.value);
  }
};

// (N, C, H, W) as (N, C * H * W), in PyTorch's order or with the channels innermost, as a linear's weight can have it.
struct FlattenStep final : ReshapeStep {
  bool channels_last;

  explicit FlattenStep(Reader& r) {
    const Value& x = r.image();
    const std::string order = r.line.word("order", "contiguous");
    r.line.check(order == "contiguous" || order == "channels_last", "needs an order contiguous or channels_last");
    channels_last = order == "channels_last", from = x.sizes;
    to = {x.sizes[0], checked_product({x.sizes[1], x.sizes[2], x.sizes[3]})};
    r.output(to, x.dtype, natural_order(2));
  }
  void emit(Emitter& e) override {
    Position x = e.values().position(e.operand(0));
    if (!channels_last) return emit_of(e, std::move(x), from);
    const Sizes s = x.strides;
    emit_of(e, {x.root, x.offset, {s[0], s[2], s[3], s[1]}}, {from[0], from[2], from[3], from[1]});
  }
};

// permute %x dims=0,2,1
struct PermuteStep final : Step {
  Sizes dims;

  explicit PermuteStep(Reader& r) {
    r.needs_operands(1);
    const Value& x = r.any_operand(0);
    dims = r.line.list("dims");
    Sizes sorted = dims, sizes, order;
    std::sort(sorted.begin(), sorted.end());
    r.line.check(sorted == natural_order(x.sizes.size()), "needs a permutation of the dimensions of " + to_string(x.sizes));
    for (const int64_t d : dims) sizes.push_back(x.sizes[static_cast<size_t>(d)]);
    for (const int64_t d : x.order) order.push_back(std::find(dims.begin(), dims.end(), d) - dims.begin());
    r.output(std::move(sizes), x.dtype, std::move(order));
  }
  void emit(Emitter& e) override {
    const Position x = e.values().position(e.operand(0));
    Sizes strides;
    for (const int64_t d : dims) strides.push_back(x.strides[static_cast<size_t>(d)]);
    e.view({x.root, x.offset, std::move(strides)});
  }
};

// slice %x start=3 stop=5: of the channels, or of dimension `dim`.
struct SliceStep final : Step {
  size_t dim;
  int64_t start;

  explicit SliceStep(Reader& r) {
    r.needs_operands(1);
    const Value& x = r.any_operand(0);
    const bool named = r.line.has("dim");
    const int64_t at = named ? r.line.number_of("dim") : 1, rank = static_cast<int64_t>(x.sizes.size());
    dim = static_cast<size_t>(at), start = r.line.number_of("start");
    const int64_t stop = r.line.number_of("stop");
    r.line.check(at >= 0 && at < rank && (named || rank == 4 || rank == 2) && 0 <= start && start < stop && stop <= x.sizes[dim],
                 "needs 0 <= start < stop <= channels, got " + to_string(x.sizes));
    Sizes sizes = x.sizes;
    sizes[dim] = stop - start;
    r.output(std::move(sizes), x.dtype, x.order);
  }
  void emit(Emitter& e) override {
    Position x = e.values().position(e.operand(0));
    x.offset += start * x.strides[dim];
    e.view(std::move(x));
  }
};

// select %x dim=0 index=2: one of them, without the dimension.
struct SelectStep final : Step {
  size_t dim;
  int64_t index;

  explicit SelectStep(Reader& r) {
    r.needs_operands(1);
    const Value& x = r.any_operand(0);
    const int64_t at = r.line.number_of("dim");
    index = r.line.number_of("index"), dim = static_cast<size_t>(at);
    r.line.check(at >= 0 && dim < x.sizes.size() && x.sizes.size() > 1 && index >= 0 && index < x.sizes[dim],
                 "needs a dimension and an index of it, got " + to_string(x.sizes));
    Sizes sizes = x.sizes, order;
    sizes.erase(sizes.begin() + at);
    for (const int64_t d : x.order)
      if (d != at) order.push_back(d - (d > at));
    r.output(std::move(sizes), x.dtype, std::move(order));
  }
  void emit(Emitter& e) override {
    Position x = e.values().position(e.operand(0));
    x.offset += index * x.strides[dim];
    x.strides.erase(x.strides.begin() + static_cast<std::ptrdiff_t>(dim));
    e.view(std::move(x));
  }
};

// expand %x sizes=-1,12,64: -1 keeps a dimension; those of one element are read again and again. expand %x %y sizes=0,12,64:
// 0 is the size of y's first dimension, which may be another one in each call.
struct ExpandStep final : Step {
  explicit ExpandStep(Reader& r) {
    const bool like = r.line.operands.size() == 2;
    r.needs_operands(like ? 2 : 1);
    const Value& x = r.any_operand(0);
    Sizes sizes = r.line.list("sizes");
    r.line.check(sizes.size() == x.sizes.size(), "needs as many sizes as dimensions, got " + to_string(x.sizes));
    for (size_t d = 0; d < sizes.size(); d++) {
      if (sizes[d] == 0 && like) sizes[d] = r.any_operand(1).sizes[0];
      if (sizes[d] == -1) sizes[d] = x.sizes[d];
      r.line.check(sizes[d] == x.sizes[d] || (x.sizes[d] == 1 && sizes[d] >= 0), "cannot expand " + to_string(x.sizes));
    }
    const size_t rank = sizes.size();
    r.output(std::move(sizes), x.dtype, natural_order(rank));
  }
  void emit(Emitter& e) override {
    Position x = e.values().position(e.operand(0));
    const Sizes &from = e.of(e.operand(0)).sizes, &to = e.of(e.value).sizes;
    for (size_t d = 0; d < to.size(); d++)
      if (from[d] != to[d]) x.strides[d] = 0;
    e.view(std::move(x));
  }
};

// constant dtype=float32 sizes=1,197,768 value=$3: a table of positions and the like, read where it lies.
struct ConstantStep final : Step {
  explicit ConstantStep(Reader& r) {
    r.needs_operands(0);
    const std::string& word = r.line.word("dtype");
    const DType known[] = {DType::f64, DType::f32, DType::bf16, DType::f16, DType::boolean};
    const auto* found = std::find_if(std::begin(known), std::end(known), [&](DType d) { return word == ai3::name_of(d); });
    r.line.check(found != std::end(known), "has no such type");
    r.constant_output("value", r.line.list("sizes"), *found);
  }
  void emit(Emitter&) override {}
};

// roll %x shifts=3,3 dims=1,2: copies of the pieces, to where they come.
struct RollStep final : Step {
  Sizes shifts, dims;

  explicit RollStep(Reader& r) {
    r.needs_operands(1);
    const Value& x = r.any_operand(0);
    const Sizes given = r.line.list("shifts"), along = r.line.list("dims");
    r.line.check(given.size() == along.size(), "needs as many shifts as dims");
    for (size_t i = 0; i < along.size(); i++) {
      const int64_t d = along[i];
      r.line.check(d >= 0 && d < static_cast<int64_t>(x.sizes.size()), "has no such dimension: " + to_string(x.sizes));
      const int64_t size = x.sizes[static_cast<size_t>(d)], shift = size == 0 ? 0 : (given[i] % size + size) % size;
      const auto known = std::find(dims.begin(), dims.end(), d);
      if (known == dims.end())
        dims.push_back(d), shifts.push_back(shift);
      else if (int64_t& sum = shifts[static_cast<size_t>(known - dims.begin())]; size > 0)  // named twice, shifted twice
        sum = (sum + shift) % size;
    }
    r.output(x.sizes, x.dtype, x.order);
  }
  void emit(Emitter& e) override {
    const int from = e.operand(0);
    const Position x = e.values().position(from), y = e.values().position(e.value);
    const size_t count = dims.size();
    for (size_t piece = 0; piece < size_t{1} << count; piece++) {
      Sizes sizes = e.of(from).sizes;
      Position source = x, target = y;
      for (size_t i = 0; i < count; i++) {
        const auto d = static_cast<size_t>(dims[i]);
        const int64_t size = sizes[d], shift = shifts[i];
        const bool wraps = piece >> i & 1;  // the last `shift` come first
        sizes[d] = wraps ? shift : size - shift;
        source.offset += (wraps ? size - shift : 0) * x.strides[d], target.offset += (wraps ? 0 : shift) * y.strides[d];
      }
      if (count_of(sizes) == 0) continue;
      e.copy(e.values().add_view(x.root, sizes, source), e.values().add_view(y.root, sizes, target));
    }
  }
};

AI3_STEP(reshape, ReshapeStep)
AI3_STEP(flatten, FlattenStep)
AI3_STEP(permute, PermuteStep)
AI3_STEP(slice, SliceStep)
AI3_STEP(select, SelectStep)
AI3_STEP(expand, ExpandStep)
AI3_STEP(roll, RollStep)
AI3_STEP(constant, ConstantStep)

}  // namespace
}  // namespace ai3::ops::program

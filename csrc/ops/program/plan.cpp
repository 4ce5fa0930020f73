#include "plan.h"

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>

#include "../../algos/core/level.h"
#include "../conv2d.h"
#include "../linear.h"
#include "../passes.h"
#include "../pool2d.h"
#include "arena.h"

namespace ai3::ops::program {

uint64_t mix_seal(uint64_t seal, int64_t bytes, uint64_t tag) {
  for (const uint64_t part : {static_cast<uint64_t>(bytes), tag}) {
    seal = (seal ^ part) * 0x100000001b3u;
    seal ^= seal >> 32;
  }
  return seal + 1;
}

namespace {

constexpr int kNever = std::numeric_limits<int>::max();

enum class Home { arena, input, output };

// A tensor of a program. Images are NHWC: a value is rows (pixels) of channels, in memory of its own or in a part of its
// parent's.
struct Value {
  Sizes sizes;
  DType dtype;
  int64_t rows, channels;
  int parent = -1;
  int64_t channel = 0;    // of the parent, where this begins
  bool reshaped = false;  // its rows are several of the parent's, which lie side by side
  // Of a value without parent:
  Home home = Home::arena;
  int index = 0;                  // of the input or output
  int64_t row = 0;                // elements from row to row
  bool planar = false;            // a contiguous NCHW image: an input that is not converted yet, or an output
  int converted_from = -1;        // the planar input that is copied here before the first step that reads this
  int first = kNever, last = -1;  // steps
  int64_t offset = 0;

  bool is_image() const { return sizes.size() == 4; }
  int64_t bytes() const { return checked_product({rows, row, size_of(dtype)}); }
};

struct Draft {
  Step step;
  int input = -1, other = -1, residual = -1, output = -1;  // values; `other` is a map's second input
};

// The step that a line stands for, sizes known, places not.
struct Node {
  std::variant<std::monostate, Conv2dProblem, LinearProblem, Pool2dProblem, MapProblem> problem;
  const Entry* entry = nullptr;
  bool writes_slices = false, reads_slices = false, reads_planes = false;
};

struct Planner {
  explicit Planner(Plan& p) : plan(p) {}
  Plan& plan;
  std::vector<Value> values;
  std::vector<Node> nodes;  // of each line
  std::vector<Draft> drafts;
  std::vector<int> last_line;  // that reads what a value's memory holds, by value without parent; of the lines' values
  std::map<int, int> dense_copies;

  const Program& program = plan.program;
  int inputs() const { return program.inputs; }

  // ---- Sizes ------------------------------------------------------------------------------------------------------------------

  static Value value_of(Sizes sizes, DType dtype) {
    Value v{};
    v.dtype = dtype;
    const bool image = sizes.size() == 4;
    v.channels = image ? sizes[1] : sizes.back();
    v.rows = 1;
    for (size_t d = 0; d < sizes.size(); d++)
      if (d != (image ? 1 : sizes.size() - 1)) v.rows = checked_mul(v.rows, sizes[d]);
    v.sizes = std::move(sizes);
    v.row = v.channels;
    if (v.bytes() == kOverflow) throw std::runtime_error("a tensor of sizes " + to_string(v.sizes) + " is too large");
    return v;
  }
  int add(Value v) {
    values.push_back(std::move(v));
    return static_cast<int>(values.size()) - 1;
  }

  // The entry of "<operation>_<algorithm>", a method with a kernel for the CPU; null where the line is of another kind.
  template <class P>
  const Entry* entry_of(const Line& line, const char* operation) const {
    const std::string prefix = std::string(operation) + "_";
    if (line.operation.compare(0, prefix.size(), prefix) != 0) return nullptr;
    const Entry* entry = nullptr;
    try {
      entry = &entry_named(operation_known(operation), line.operation.substr(prefix.size()));
    } catch (const std::exception& e) {
      line.fail(e.what());
    }
    const auto* algorithm = entry->template algorithm<P>(Device::cpu);
    line.check(algorithm && algorithm->run, "needs an algorithm with a kernel of its own on the CPU");
    line.check(algorithm->traits.layout != Layout::nchw, "computes in NCHW; programs keep images in NHWC");
    return entry;
  }
  // The values that a line gives the algorithm's own parameters.
  static Parameters own(const Line& line, const Entry& entry) {
    Parameters all = entry.defaults;
    for (size_t i = 0; i < entry.parameters.size(); i++) {
      const Parameter& p = entry.parameters[i];
      if (!line.has(p.name)) continue;
      all.values[i] = p.kind == Parameter::Kind::real ? std::bit_cast<int64_t>(line.real(p.name)) : line.number_of(p.name);
    }
    return all;
  }
  void operands(const Line& line, size_t count) const {
    line.check(line.operands.size() == count,
               "needs " + std::to_string(count) + " values, got " + std::to_string(line.operands.size()));
  }
  const Value& operand(const Line& line, size_t i) const { return values[static_cast<size_t>(line.operands[i])]; }
  const Value& image(const Line& line) const {
    operands(line, 1);
    const Value& x = operand(line, 0);
    line.check(x.is_image(), "needs an image (N, C, H, W), got " + to_string(x.sizes));
    return x;
  }
  // What a constant must be; the same in all lines that read it.
  void constant(const Line& line, const char* name, int64_t bytes, uint64_t tag) {
    const Constant wanted{bytes, tag};
    Constant& known = plan.constants[static_cast<size_t>(line.constant(name))];
    line.check(bytes < kOverflow && (known.bytes < 0 || known == wanted),
               "needs a constant of " + std::to_string(bytes) + " bytes as " + name + ", which a line before it reads as " +
                   std::to_string(known.bytes) + " bytes" + (known.bytes == bytes ? " in another form" : ""));
    known = wanted;
  }
  void elements(const Line& line, const char* name, DType dtype, int64_t count) {
    if (line.has(name)) constant(line, name, checked_mul(count, size_of(dtype)), 0);
  }
  Activation activation_of(const Line& line, DType dtype, int64_t channels) {
    const std::optional<Activation> found = activation_called(line.word("activation", "none"));
    line.check(found.has_value(), "unknown activation '" + line.word("activation", "none") + "'");
    line.check(has_slope(*found) == line.has("slope"), std::string(has_slope(*found) ? "needs a slope" : "takes no slope") +
                                                           " for activation " + line.word("activation", "none"));
    elements(line, "slope", accumulator(dtype), channels);
    return *found;
  }
  template <class P>
  void weight(const Line& line, const Entry& entry, const P& p, int64_t count) {
    const auto& traits = entry.algorithm<P>(Device::cpu)->traits;
    line.check(line.has("weight"), "needs weight");
    if (traits.packed_bytes || traits.epilogue)
      constant(line, "weight", packed_tensor_bytes(traits, p), pack_tag(entry, pack_description(p)));
    else
      elements(line, "weight", p.dtype, count);
  }
  static DType accumulator(DType dtype) { return dtype == DType::f64 ? DType::f64 : DType::f32; }

  void conv2d(const Line& line, const Entry& entry, Node& node) {
    const Value& x = image(line);
    const Sizes w = line.constant_sizes("weight", 4), stride = line.numbers("stride", 2), padding = line.numbers("padding", 2),
                dilation = line.numbers("dilation", 2);
    const int64_t groups = line.number_of("groups");
    auto each = [&](const Sizes& list, int64_t least, const char* name) {
      for (int64_t v : list)
        line.check(v >= least && v <= INT32_MAX, std::string("needs ") + name + " of at least " + std::to_string(least));
    };
    each(w, 1, "sizes of weight"), each(stride, 1, "stride"), each(padding, 0, "padding"), each(dilation, 1, "dilation");
    line.check(groups > 0 && w[0] % groups == 0 && x.channels == checked_mul(w[1], groups),
               "needs input of " + std::to_string(checked_mul(w[1], groups)) + " channels and groups that divide " +
                   std::to_string(w[0]) + ", got " + to_string(x.sizes));
    const int64_t sizes[] = {x.sizes[0],  x.sizes[1], x.sizes[2],       x.sizes[3], w[0],       w[2],
                             w[3],        stride[0],  stride[1],        padding[0], padding[1], dilation[0],
                             dilation[1], groups,     line.has("bias"), 1,          0};
    Conv2dProblem p = conv2d_from({x.dtype, sizes, std::size(sizes)});
    p.parameters = own(line, entry);
    p.activation = activation_of(line, p.dtype, w[0]), p.has_residual = line.has("residual");
    p.input_relu = line.word("input_relu", "0") == "1", p.has_prologue = line.has("scale");
    line.check(p.has_prologue == line.has("shift") && (p.has_prologue || !p.input_relu), "needs scale with shift and input_relu");
    const auto& traits = entry.algorithm<Conv2dProblem>(Device::cpu)->traits;
    line.check(traits.epilogue || (!p.has_residual && p.activation == Activation::none),
               entry.name + " fuses no residual and no activation");
    weight(line, entry, p, checked_product({w[0], w[1], w[2], w[3]}));
    elements(line, "bias", p.dtype, w[0]);
    elements(line, "scale", accumulator(p.dtype), x.channels), elements(line, "shift", accumulator(p.dtype), x.channels);
    // Of the built-in algorithms the one that reads an NCHW image into NHWC output (docs/decisions/program.md).
    constexpr int64_t kFewChannels = 16;
    node.reads_planes = entry.name == "direct" && level() == entry.on(Device::cpu)->level && x.channels < kFewChannels;
    node.problem = p, node.reads_slices = traits.sliced, node.writes_slices = traits.sliced && !p.has_residual;
    add(value_of({p.batch, p.out_channels, p.out_height, p.out_width}, p.dtype));
    check_residual(line);
  }
  void linear(const Line& line, const Entry& entry, Node& node) {
    operands(line, 1);
    const Value& x = operand(line, 0);
    const Sizes w = line.constant_sizes("weight", 2);
    line.check(!x.is_image() && x.channels == w[1] && w[0] > 0,
               "needs rows of " + std::to_string(w[1]) + " features, got " + to_string(x.sizes));
    const int64_t sizes[] = {x.rows, w[1], w[0], line.has("bias"), 0};
    LinearProblem p = linear_from({x.dtype, sizes, std::size(sizes)});
    p.parameters = own(line, entry);
    p.activation = activation_of(line, p.dtype, w[0]), p.has_residual = line.has("residual");
    const auto& traits = entry.algorithm<LinearProblem>(Device::cpu)->traits;
    line.check(traits.epilogue || (!p.has_residual && p.activation == Activation::none),
               entry.name + " fuses no residual and no activation");
    weight(line, entry, p, checked_mul(w[0], w[1]));
    elements(line, "bias", p.dtype, w[0]);
    node.problem = p;
    Sizes out = x.sizes;
    out.back() = w[0];
    add(value_of(std::move(out), p.dtype));
    check_residual(line);
  }
  void check_residual(const Line& line) {
    if (!line.has("residual")) return;
    const Value &r = values[static_cast<size_t>(line.value("residual"))], &y = values.back();
    line.check(r.sizes == y.sizes && r.dtype == y.dtype,
               "needs a residual of the output's sizes " + to_string(y.sizes) + ", got " + to_string(r.sizes));
  }
  void pool2d(const Line& line, Node& node, bool adaptive) {
    const Value& x = image(line);
    Pool2dProblem p;
    if (adaptive) {
      const Sizes out = line.numbers("output_size", 2);
      line.check(out[0] > 0 && out[1] > 0, "needs an output_size of at least 1");
      const int64_t sizes[] = {x.sizes[0], x.channels, x.sizes[2], x.sizes[3], out[0], out[1], 1};
      p = adaptive_pool2d_from({x.dtype, sizes, std::size(sizes)});
    } else {
      const Sizes kernel = line.numbers("kernel_size", 2), stride = line.numbers("stride", 2),
                  padding = line.numbers("padding", 2), dilation = line.numbers("dilation", 2);
      for (size_t i : {0u, 1u})
        line.check(kernel[i] > 0 && stride[i] > 0 && dilation[i] > 0 && padding[i] >= 0 && padding[i] <= kernel[i] / 2,
                   "needs kernel_size, stride and dilation of at least 1, and padding of at most half the kernel");
      const int64_t sizes[] = {x.sizes[0],
                               x.channels,
                               x.sizes[2],
                               x.sizes[3],
                               kernel[0],
                               kernel[1],
                               stride[0],
                               stride[1],
                               padding[0],
                               padding[1],
                               dilation[0],
                               dilation[1],
                               line.number_of("ceil_mode"),
                               line.has("count_include_pad") ? line.number_of("count_include_pad") : 1,
                               line.has("divisor") ? line.number_of("divisor") : 0,
                               1};
      p = pool2d_from({x.dtype, sizes, std::size(sizes)});
      line.check(p.out_height > 0 && p.out_width > 0, "the input " + to_string(x.sizes) + " is too small");
    }
    p.parameters = own(line, *node.entry);
    node.problem = p, node.reads_slices = node.writes_slices = true;
    add(value_of({p.batch, p.channels, p.out_height, p.out_width}, p.dtype));
  }
  void map(const Line& line, Node& node, MapKind kind) {
    const bool binary = kind == MapKind::add || kind == MapKind::multiply;
    operands(line, binary ? 2 : 1);
    const Value& x = operand(line, 0);
    MapProblem p{};
    p.dtype = x.dtype, p.threads = threads(), p.kind = kind, p.function = activation_of(line, x.dtype, x.channels);
    p.images = x.sizes[0], p.rows = x.rows == 0 ? 0 : x.rows / x.sizes[0], p.channels = x.channels;
    if (binary) {
      const Value& z = operand(line, 1);
      p.z_per_image = z.sizes != x.sizes;
      const bool fits = !p.z_per_image || (x.is_image() && z.sizes == Sizes{x.sizes[0], x.channels, 1, 1});
      line.check(fits && z.dtype == x.dtype, "needs values of the same sizes, or a second one (N, C, 1, 1), got " +
                                                 to_string(x.sizes) + " and " + to_string(z.sizes));
    }
    if (kind == MapKind::affine)
      elements(line, "scale", accumulator(x.dtype), x.channels), elements(line, "shift", accumulator(x.dtype), x.channels);
    node.problem = p, node.reads_slices = node.writes_slices = true;
    add(value_of(x.sizes, x.dtype));
  }
  void concat(const Line& line) {
    line.check(!line.operands.empty(), "needs values");
    Sizes sizes = operand(line, 0).sizes;
    line.check(sizes.size() == 4 || sizes.size() == 2, "needs images, or rows of two dimensions, got " + to_string(sizes));
    int64_t channels = 0;
    for (size_t i = 0; i < line.operands.size(); i++) {
      const Value& v = operand(line, i);
      channels = checked_add(channels, v.channels), sizes[1] = v.channels;
      line.check(
          v.sizes == sizes && v.dtype == operand(line, 0).dtype,
          "needs values that differ in channels alone, got " + to_string(operand(line, 0).sizes) + " and " + to_string(v.sizes));
    }
    sizes[1] = channels;
    add(value_of(std::move(sizes), operand(line, 0).dtype));
  }
  void slice(const Line& line) {
    operands(line, 1);
    const Value& x = operand(line, 0);
    const int64_t start = line.number_of("start"), stop = line.number_of("stop");
    line.check((x.sizes.size() == 4 || x.sizes.size() == 2) && 0 <= start && start < stop && stop <= x.channels,
               "needs 0 <= start < stop <= channels, got " + to_string(x.sizes));
    Sizes sizes = x.sizes;
    sizes[1] = stop - start;
    Value v = value_of(std::move(sizes), x.dtype);
    v.parent = line.operands[0], v.channel = start;
    add(std::move(v));
  }
  void flatten(const Line& line) {
    const Value& x = image(line);
    const std::string order = line.word("order", "contiguous");
    line.check(order == "contiguous" || order == "channels_last", "needs an order contiguous or channels_last");
    add(value_of({x.sizes[0], checked_product({x.sizes[1], x.sizes[2], x.sizes[3]})}, x.dtype));
  }

  void input(const Line& line, const InputLayout& layout, int index) {
    line.check(line.words.size() == 2, "needs input <dtype> <number of dimensions>");
    line.check(line.words[0] == ai3::name_of(layout.dtype), std::string("got a tensor of ") + ai3::name_of(layout.dtype));
    line.check(line.words[1] == std::to_string(layout.sizes.size()) && layout.sizes.size() >= 2,
               "got a tensor of sizes " + to_string(layout.sizes));
    for (size_t d = 1; d < layout.sizes.size(); d++)
      line.check(layout.sizes[d] > 0, "needs a tensor with no dimension of 0 but the first, got " + to_string(layout.sizes));
    Value v = value_of(layout.sizes, layout.dtype);
    if (layout.row) v.home = Home::input, v.index = index, v.row = layout.row;
    nodes[static_cast<size_t>(index)].writes_slices = true;  // the copy of an NCHW image
    add(std::move(v));
  }

  void infer(const std::vector<InputLayout>& layouts) {
    if (static_cast<int>(layouts.size()) != inputs())
      throw std::runtime_error("ai3::_program: needs " + std::to_string(inputs()) + " inputs, got " +
                               std::to_string(layouts.size()));
    nodes.resize(program.lines.size());
    plan.constants.resize(static_cast<size_t>(program.constants));
    for (size_t i = 0; i < program.lines.size(); i++) {
      const Line& line = program.lines[i];
      Node& node = nodes[i];
      try {
        if (line.operation == "input")
          input(line, layouts[i], static_cast<int>(i));
        else if ((node.entry = entry_of<Conv2dProblem>(line, "conv2d")))
          conv2d(line, *node.entry, node);
        else if ((node.entry = entry_of<LinearProblem>(line, "linear")))
          linear(line, *node.entry, node);
        else if ((node.entry = entry_of<Pool2dProblem>(line, "adaptive_avg_pool2d")))
          pool2d(line, node, true);
        else if ((node.entry = entry_of<Pool2dProblem>(line, "max_pool2d")))
          pool2d(line, node, false);
        else if ((node.entry = entry_of<Pool2dProblem>(line, "avg_pool2d")))
          pool2d(line, node, false);
        else if (line.operation == "activate")
          map(line, node, MapKind::activate);
        else if (line.operation == "add")
          map(line, node, MapKind::add);
        else if (line.operation == "multiply")
          map(line, node, MapKind::multiply);
        else if (line.operation == "affine")
          map(line, node, MapKind::affine);
        else if (line.operation == "concat")
          concat(line);
        else if (line.operation == "slice")
          slice(line);
        else if (line.operation == "flatten")
          flatten(line);
        else
          line.fail("unknown operation '" + line.operation + "'");
      } catch (const std::exception& e) {
        if (std::strstr(e.what(), "ai3::_program")) throw;
        line.fail(e.what());
      }
    }
    for (size_t i = 0; i < plan.constants.size(); i++) {
      Constant& c = plan.constants[i];
      if (c.bytes < 0) throw std::runtime_error("ai3::_program: no line reads constant " + std::to_string(i));
      c.offset = plan.constant_bytes;
      plan.constant_bytes = checked_add(plan.constant_bytes, round_up(c.bytes, 64));
      plan.seal = mix_seal(plan.seal, c.bytes, c.tag);
    }
    plan.constant_bytes = checked_add(plan.constant_bytes, kSealBytes);
  }

  // ---- Places -----------------------------------------------------------------------------------------------------------------

  Value& at(int value) { return values[static_cast<size_t>(value)]; }
  struct Position {
    int root;
    int64_t channel, row;
  };
  // Where a value lies: in which memory, from which channel of its rows on, and how far apart rows are.
  Position position(int value) {
    const Value& v = at(value);
    if (v.parent < 0) return {value, 0, v.row};
    Position p = position(v.parent);
    p.channel += v.channel;
    if (v.reshaped) p.row = v.channels;
    return p;
  }
  bool is_line(int value) const { return value < static_cast<int>(nodes.size()); }
  bool is_concat(int value) const { return is_line(value) && program.lines[static_cast<size_t>(value)].operation == "concat"; }

  // Concatenations are no steps where their parts are written into them at once. The widest come first, so that one which is a
  // part of a wider one, as all but a dense block's last are, lies in it.
  void place_concatenations() {
    std::vector<int> concats;
    for (size_t i = 0; i < program.lines.size(); i++)
      if (program.lines[i].operation == "concat") concats.push_back(static_cast<int>(i));
    std::stable_sort(concats.begin(), concats.end(),
                     [&](int a, int b) { return at(a).channels != at(b).channels ? at(a).channels > at(b).channels : a > b; });
    for (int c : concats) {
      const std::vector<int>& parts = program.lines[static_cast<size_t>(c)].operands;
      if (at(c).parent < 0 && lie_side_by_side(parts)) {
        at(c).parent = parts[0];  // from whose first channel on all of them lie
        continue;
      }
      int64_t channel = 0;
      for (int part : parts) {
        Value& v = at(part);
        const bool writes = is_line(part) && (nodes[static_cast<size_t>(part)].writes_slices || is_concat(part));
        if (v.parent < 0 && v.home == Home::arena && writes && !has_ancestor(c, part)) v.parent = c, v.channel = channel;
        channel += v.channels;
      }
    }
  }
  bool has_ancestor(int value, int ancestor) {
    for (int v = value; v >= 0; v = at(v).parent)
      if (v == ancestor) return true;
    return false;
  }
  bool lie_side_by_side(const std::vector<int>& parts) {
    const Position first = position(parts[0]);
    if (first.root == parts[0] && parts.size() > 1) return false;
    int64_t channel = first.channel;
    for (int part : parts) {
      const Position p = position(part);
      if (p.root != first.root || p.channel != channel || at(part).reshaped) return false;
      channel += at(part).channels;
    }
    return true;
  }

  // Results that are memory of their own are written where the caller gets them.
  void place_results() {
    for (size_t i = 0; i < program.results.size(); i++) {
      const Result& r = program.results[i];
      Value& v = at(r.value);
      plan.outputs.push_back({v.sizes, v.dtype, v.is_image() && r.channels_last});
      const bool rows = !v.is_image() || r.channels_last || v.channels == 1 || v.sizes[2] * v.sizes[3] == 1;
      if (v.parent < 0 && v.home == Home::arena && r.value >= inputs() && rows && !is_flat(r.value))
        v.home = Home::output, v.index = static_cast<int>(i);
    }
  }
  bool is_flat(int value) const { return program.lines[static_cast<size_t>(value)].operation == "flatten"; }

  void find_last_lines() {
    last_line.assign(values.size(), -1);
    auto read = [&](int value, int line) { last_line[static_cast<size_t>(position(value).root)] = line; };
    for (size_t i = 0; i < program.lines.size(); i++) {
      for (int v : program.lines[i].operands) read(v, static_cast<int>(i));
      if (program.lines[i].has("residual")) read(program.lines[i].value("residual"), static_cast<int>(i));
    }
    for (const Result& r : program.results) read(r.value, kNever);
  }

  // ---- Steps ------------------------------------------------------------------------------------------------------------------

  Strides4 strides_of(int value) {
    const Value& v = at(value);
    if (v.planar) return dense_strides(v.channels, v.sizes[2], v.sizes[3], false);
    const int64_t row = position(value).row;
    if (!v.is_image()) return {row, 1, row, row};
    return {v.sizes[2] * v.sizes[3] * row, 1, v.sizes[3] * row, row};
  }
  void emit(Draft draft, const Line& line) {
    draft.step.line = &line;
    draft.step.sizes = at(draft.output).sizes, draft.step.output_row = position(draft.output).row;
    drafts.push_back(std::move(draft));
  }
  void emit_copy(int from, int to, const Line& line) {
    const Value& v = at(from);
    if (v.rows == 0) return;
    const bool image = v.is_image();
    CopyProblem p{
        v.dtype,          threads(),     image ? v.sizes[0] : v.rows, v.channels, image ? v.sizes[2] : 1, image ? v.sizes[3] : 1,
        strides_of(from), strides_of(to)};
    join_rows(p);
    Draft d;
    d.step.call = p, d.input = from, d.output = to;
    emit(std::move(d), line);
  }
  // The value with its rows in memory: an NCHW input is copied when it is first read.
  int as_rows(int value, const Line& line) {
    for (int v = value; v >= 0; v = at(v).parent)
      if (const int from = at(v).converted_from; from >= 0) at(v).converted_from = -1, emit_copy(from, v, line);
    return value;
  }
  int as_dense_rows(int value, const Line& line) {
    as_rows(value, line);
    if (position(value).row == at(value).channels || at(value).rows <= 1) return value;
    if (const auto found = dense_copies.find(value); found != dense_copies.end()) return found->second;
    const int copy = add(value_of(at(value).sizes, at(value).dtype));
    emit_copy(value, copy, line);
    dense_copies[value] = copy;
    return copy;
  }
  int readable(int value, bool slices, const Line& line) { return slices ? as_rows(value, line) : as_dense_rows(value, line); }

  Place constant_place(const Line& line, const char* name) const {
    const int index = line.constant(name);
    return index < 0 ? Place{} : Place{1 + inputs(), plan.constants[static_cast<size_t>(index)].offset};
  }
  void emit_step(int y) {
    const Line& line = program.lines[static_cast<size_t>(y)];
    Node& node = nodes[static_cast<size_t>(y)];
    if (at(y).rows == 0) return;  // an empty batch
    Draft d;
    d.output = y;
    d.step.weight = constant_place(line, "weight"), d.step.bias = constant_place(line, "bias");
    d.step.scale = constant_place(line, "scale"), d.step.shift = constant_place(line, "shift");
    d.step.slope = constant_place(line, "slope");
    const int planes = at(line.operands[0]).converted_from;
    d.input = node.reads_planes && planes >= 0 ? planes : readable(line.operands[0], node.reads_slices, line);
    if (line.has("residual")) d.residual = as_dense_rows(line.value("residual"), line);
    try {
      if (auto* conv = std::get_if<Conv2dProblem>(&node.problem)) {
        conv->x_stride = strides_of(d.input), conv->y_stride = strides_of(y);
        d.step.call = prepare(*node.entry, Where{}, *conv);
      } else if (auto* linear = std::get_if<LinearProblem>(&node.problem)) {
        d.step.call = prepare(*node.entry, Where{}, *linear);
      } else if (auto* pool = std::get_if<Pool2dProblem>(&node.problem)) {
        pool->x_stride = strides_of(d.input), pool->y_stride = strides_of(y);
        d.step.call = prepare(*node.entry, Where{}, *pool);
      } else {
        auto& map = std::get<MapProblem>(node.problem);
        if (line.operands.size() == 2) d.other = as_rows(line.operands[1], line);
        for (int x : {d.input, d.other})
          if (x >= 0 && overwrites(y, x)) {
            at(y).parent = position(x).root;
            last_line[static_cast<size_t>(at(y).parent)] = last_line[static_cast<size_t>(y)];
          }
        map.x_row = position(d.input).row, map.y_row = position(y).row, map.z_row = d.other < 0 ? 0 : position(d.other).row;
        const bool dense = map.x_row == map.channels && map.y_row == map.channels && (d.other < 0 || map.z_row == map.channels);
        const bool alike = map.kind != MapKind::affine && !has_slope(map.function) && !map.z_per_image;
        if (dense && alike) {
          map.channels *= map.rows * map.images, map.rows = map.images = 1;
          map.x_row = map.y_row = map.channels, map.z_row = d.other < 0 ? 0 : map.channels;
        }
        d.step.call = map;
      }
    } catch (const std::exception& e) {
      line.fail(e.what());
    }
    emit(std::move(d), line);
  }
  // Whether a map may write its output over x, which nothing reads any more.
  bool overwrites(int y, int x) {
    const Position p = position(x);
    const Value &root = at(p.root), &to = at(y);
    return to.parent < 0 && to.home == Home::arena && root.home == Home::arena && p.channel == 0 && !at(x).reshaped &&
           at(x).sizes == to.sizes && root.channels == to.channels && root.rows == to.rows && root.row == to.row &&
           is_line(p.root) && last_line[static_cast<size_t>(p.root)] == y && p.root != y;
  }
  void emit_concat(int y) {
    const Line& line = program.lines[static_cast<size_t>(y)];
    int64_t channel = 0;
    for (int part : line.operands) {
      as_rows(part, line);
      const Position to = position(y), from = position(part);
      if (from.root != to.root || from.channel != to.channel + channel) {
        Value place = value_of(at(part).sizes, at(part).dtype);
        place.parent = y, place.channel = channel;
        emit_copy(part, add(std::move(place)), line);
      }
      channel += at(part).channels;
    }
  }
  void emit_flatten(int y) {
    const Line& line = program.lines[static_cast<size_t>(y)];
    const int64_t pixels = at(line.operands[0]).sizes[2] * at(line.operands[0]).sizes[3];
    const bool by_rows = pixels == 1 || line.word("order", "contiguous") == "channels_last";
    const int planes_of = at(line.operands[0]).converted_from;  // an NCHW input needs no rows for the order of NCHW
    const int x = !by_rows && planes_of >= 0 ? planes_of : as_rows(line.operands[0], line);
    if (pixels == 1) {
      at(y).parent = x;
    } else if (by_rows) {
      at(y).parent = as_dense_rows(x, line), at(y).reshaped = true;
    } else {
      Value planes = value_of(at(x).sizes, at(x).dtype);  // the same memory, seen as NCHW planes
      planes.parent = y, planes.planar = true;
      const int target = add(std::move(planes));
      emit_copy(x, target, line);
      return;
    }
    if (const int root = position(y).root; is_line(root)) {
      int& last = last_line[static_cast<size_t>(root)];
      last = std::max(last, last_line[static_cast<size_t>(y)]);
    }
  }

  void emit_all() {
    for (int i = 0; i < inputs(); i++)
      if (at(i).home != Home::input) {
        Value planes = at(i);
        planes.home = Home::input, planes.index = i, planes.planar = true, planes.parent = -1, planes.channel = 0;
        at(i).converted_from = add(std::move(planes));
      }
    for (int i = inputs(); i < static_cast<int>(program.lines.size()); i++) {
      const std::string& operation = program.lines[static_cast<size_t>(i)].operation;
      if (operation == "concat")
        emit_concat(i);
      else if (operation == "flatten")
        emit_flatten(i);
      else if (operation != "slice")
        emit_step(i);
    }
    for (size_t i = 0; i < program.results.size(); i++) {
      const Result& r = program.results[i];
      const Value v = at(r.value);
      if (v.parent < 0 && v.home == Home::output && v.index == static_cast<int>(i)) continue;
      const Line& line = program.lines[static_cast<size_t>(r.value)];
      Value result = value_of(v.sizes, v.dtype);
      result.home = Home::output, result.index = static_cast<int>(i), result.planar = result.is_image() && !r.channels_last;
      // An NCHW input that is returned as it is needs no rows.
      emit_copy(v.converted_from >= 0 ? v.converted_from : as_rows(r.value, line), add(std::move(result)), line);
    }
  }

  // ---- Memory -----------------------------------------------------------------------------------------------------------------

  void place_in_arena() {
    std::vector<Block> blocks;
    for (size_t s = 0; s < drafts.size(); s++) {
      const Draft& d = drafts[s];
      for (int v : {d.input, d.other, d.residual, d.output}) {
        if (v < 0) continue;
        Value& root = at(position(v).root);
        root.first = std::min(root.first, static_cast<int>(s)), root.last = std::max(root.last, static_cast<int>(s));
      }
    }
    for (Value& v : values)
      if (v.parent < 0 && v.home == Home::arena && v.last >= 0)
        blocks.push_back({round_up(v.bytes(), 64), v.first, v.last, &v.offset});
    for (size_t s = 0; s < drafts.size(); s++) {
      Step& step = drafts[s].step;
      std::visit(
          [&](const auto& call) {
            if constexpr (requires { call.workspace; }) step.workspace_bytes = call.workspace;
          },
          step.call);
      if (step.workspace_bytes > 0) {
        step.workspace.base = 0;
        blocks.push_back({round_up(step.workspace_bytes, 64), static_cast<int>(s), static_cast<int>(s), &step.workspace.offset});
      }
    }
    plan.live_bytes = most_at_once(blocks);
    plan.arena_bytes = place(blocks);
  }
  Place place_of(int value) {
    if (value < 0) return {};
    const Position p = position(value);
    const Value& root = at(p.root);
    const int32_t base = root.home == Home::arena ? 0 : root.home == Home::input ? 1 + root.index : 2 + inputs() + root.index;
    return {base, root.offset + p.channel * size_of(at(value).dtype)};
  }
  void finish() {
    for (Draft& d : drafts) {
      d.step.input = place_of(d.input), d.step.output = place_of(d.output), d.step.residual = place_of(d.residual);
      if (d.other >= 0) d.step.weight = place_of(d.other);
      plan.steps.push_back(std::move(d.step));
    }
  }
};

}  // namespace

std::shared_ptr<const Plan> make_plan(const std::string& text, const std::vector<InputLayout>& inputs) {
  auto plan = std::make_shared<Plan>();
  plan->program = parse(text);
  Planner planner(*plan);
  planner.infer(inputs);
  planner.place_concatenations();
  planner.place_results();
  planner.find_last_lines();
  planner.emit_all();
  planner.place_in_arena();
  planner.finish();
  return plan;
}

}  // namespace ai3::ops::program
